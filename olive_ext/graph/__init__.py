"""Edits of ONNX graphs: pure functions from model to model that leave the weights where they are.

Here live the scoring head, rewrites of attentions, the shapes and patterns that these need, and small graphs that run
beside a decoder. `engine`, `run` and `check` import the functions of single modules; this package itself
exports nothing. It imports `onnx` and `olive_ext.errors` only, and knows no session, no provider and no Olive.
"""
