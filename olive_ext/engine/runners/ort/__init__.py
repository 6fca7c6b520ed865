"""Runs steps in sessions of ONNX Runtime in which everything is bound. Knows no request."""
