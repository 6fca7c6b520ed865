"""Runs steps in sessions of ONNX Runtime in which everything is bound.

`opening` makes an `OrtRunner`; the reference's kernels import `InputFeed` and the runner's device. Knows no request.
"""
