"""Shapes in symbols follow the operators; what is not known stays unknown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from olive_ext.graph.value_shapes import Shapes
from tests.graph.text import model_from

SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "heads and back": (
        "heads = Reshape (x, a) back = Reshape (heads, b)",
        {"a": [0, -1, 4], "b": [0, -1, 12]},
        {"heads": ("B", "S*3", 4), "back": ("B", "S", 12)},
    ),
    "flattened": (
        """
        flat = Reshape (x, a) y = Gemm <transB = 1> (flat, w) shape = Shape (x) length = Gather (shape, one)
        lengths = Unsqueeze (length, zero) to = Concat <axis = 0> (rest, lengths, five) back = Reshape (y, to)
        """,
        {"a": [-1, 12], "w": np.zeros((5, 12), np.float32), "one": 1, "zero": [0], "rest": [-1], "five": [5]},
        {"flat": ("B*S", 12), "y": ("B*S", 5), "back": ("B", "S", 5)},
    ),
    "attention": (
        """
        q = Reshape (x, a) turned = Transpose <perm = [0, 2, 1, 3]> (q) keys = Transpose <perm = [0, 1, 3, 2]> (cache)
        scores = MatMul (turned, keys) weights = Softmax <axis = -1> (scores) mixed = MatMul (weights, cache)
        """,
        {"a": [0, 0, 3, 4]},
        {"scores": ("B", 3, "S", "P"), "mixed": ("B", 3, "S", 4)},
    ),
    "grown": (
        "long = Concat <axis = 2> (cache, cache) cut = Slice (x, start, end, axis)",
        {"start": [1], "end": [3], "axis": [1]},
        {"long": ("B", 3, None, 4), "cut": ("B", None, 12)},
    ),
    "an operator that is not known": ("unknown = Hardmax (x)", {}, {"unknown": None}),
}


@pytest.mark.parametrize(("nodes", "weights", "shapes"), SHAPES.values(), ids=SHAPES)
def test_shapes_follow_the_operators(nodes: str, weights: dict[str, Any], shapes: dict[str, Any]) -> None:
    outputs = ", ".join(f"float {name}" for name in shapes)
    graph = f"g (float[B, S, 12] x, float[B, 3, P, 4] cache) => ({outputs}) {{ {nodes} }}"
    found = Shapes(model_from(graph, **weights).graph).of
    assert {name: found.get(name) for name in shapes} == shapes
