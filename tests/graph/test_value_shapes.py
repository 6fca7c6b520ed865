"""Shapes in symbols follow the operators; what is not known stays unknown."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from olive_ext.graph.value_shapes import Shapes
from tests.graph.heads import Parts


def shapes_of(build, *names: str):
    """Shapes after `x` [B, S, 12] and `cache` [B, 3, P, 4]."""
    parts = Parts()
    build(parts)
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["B", "S", 12]), value("cache", TensorProto.FLOAT, ["B", 3, "P", 4])]
    outputs = [value(name, TensorProto.FLOAT, None) for name in names]
    graph: onnx.GraphProto = helper.make_graph(parts.nodes, "g", inputs, outputs, parts.weights)
    return {name: Shapes(graph).of.get(name) for name in names}


def heads_and_back(p: Parts) -> None:
    p.node("Reshape", ["x", p.weight("a", [0, -1, 4], np.int64)], "heads")
    p.node("Reshape", ["heads", p.weight("b", [0, -1, 12], np.int64)], "back")


def flattened(p: Parts) -> None:
    p.node("Reshape", ["x", p.weight("a", [-1, 12], np.int64)], "flat")
    p.node("Gemm", ["flat", p.weight("w", np.zeros((5, 12)), np.float32)], "y", transB=1)
    p.node("Shape", ["x"], "shape")
    p.node("Gather", ["shape", p.weight("one", 1, np.int64)], "length")
    p.node("Unsqueeze", ["length", p.weight("zero", [0], np.int64)], "lengths")
    p.node("Concat", [p.weight("rest", [-1], np.int64), "lengths", p.weight("five", [5], np.int64)], "to", axis=0)
    p.node("Reshape", ["y", "to"], "back")


def attention(p: Parts) -> None:
    p.node("Reshape", ["x", p.weight("a", [0, 0, 3, 4], np.int64)], "q")
    p.node("Transpose", ["q"], "turned", perm=[0, 2, 1, 3])
    p.node("Transpose", ["cache"], "keys", perm=[0, 1, 3, 2])
    p.node("MatMul", ["turned", "keys"], "scores")
    p.node("Softmax", ["scores"], "weights", axis=-1)
    p.node("MatMul", ["weights", "cache"], "mixed")


def grown(p: Parts) -> None:
    p.node("Concat", ["cache", "cache"], "long", axis=2)
    p.node("Slice", ["x", *(p.weight(name, [at], np.int64) for name, at in (("s", 1), ("e", 3), ("a", 1)))], "cut")


SHAPES = [
    (heads_and_back, {"heads": ("B", "S*3", 4), "back": ("B", "S", 12)}),
    (flattened, {"flat": ("B*S", 12), "y": ("B*S", 5), "back": ("B", "S", 5)}),
    (attention, {"scores": ("B", 3, "S", "P"), "mixed": ("B", 3, "S", 4)}),
    (grown, {"long": ("B", 3, None, 4), "cut": ("B", None, 12)}),
    (lambda p: p.node("Hardmax", ["x"], "unknown"), {"unknown": None}),
]


@pytest.mark.parametrize(("build", "shapes"), SHAPES)
def test_shapes_follow_the_operators(build, shapes):
    assert shapes_of(build, *shapes) == shapes
