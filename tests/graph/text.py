"""Graphs from ONNX's text form."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx.parser
import onnxruntime as ort
from onnx import ModelProto, TensorProto, numpy_helper

from olive_ext.graph.nodes import model_of


def model_from(text: str, opset: int = 21, **weights: npt.ArrayLike | TensorProto) -> ModelProto:
    """The model of `name (float[N] x) => (float[N] y) { y = Add (x, w) }`, with such weights by name. Operators may be
    com.microsoft's. A node has the name of its first output."""
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(
        value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value), name)
        for name, value in weights.items()
    )
    for node in graph.node:
        node.name = node.output[0]
    return model_of(graph, opset, "com.microsoft")


def session_of(model: ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
