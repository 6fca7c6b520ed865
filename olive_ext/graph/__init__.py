"""Edits of ONNX graphs: functions from model to model that leave the weights where they are. Knows no session."""
