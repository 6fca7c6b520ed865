"""The quickstart's model in two places, by one command line's settings; and packages with a wrong kernel: one node of a
decoder rewritten, everything else as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from olive_ext.graph.nodes import take_attribute
from olive_ext.report import Report
from olive_ext.run import evaluate
from tests.exports.edited import edited
from tests.exports.quickstart import TASKS, exported

WORK: dict[str, Any] = {"tasks": ["quickstart_choice"], "include_path": str(TASKS), "limit": 16, "bootstrap_iters": 0}


def compared(reference: Any, model: Path | None = None, **settings: Any) -> Report:
    """The report of an evaluation of the float model, or `model`, against `reference`."""
    return evaluate(model or exported(), reference=reference, **{**WORK, **settings})


ATTRIBUTES = {
    "GroupQueryAttention": ("scale", 0.2),
    "SimplifiedLayerNormalization": ("epsilon", 0.3),
    "SkipSimplifiedLayerNormalization": ("epsilon", 0.3),
    "RMSNormalization": ("epsilon", 0.3),
    "LayerNormalization": ("epsilon", 0.3),
    "RotaryEmbedding": ("interleaved", 1),
}
OTHERS = {"Add": "Sub", "Sub": "Add", "Mul": "Add", "Sigmoid": "Tanh"}


def planted(source: Path, target: Path, number: int, *, factor: float = 1.2) -> onnx.NodeProto:
    """Copies the package `source`, with its node of this number wrong: another attribute, another operator, or a weight
    whose first numbers are `factor` times as large. Returns the node."""
    found: list[onnx.NodeProto] = []

    def rewrite(model: onnx.ModelProto) -> None:
        node = model.graph.node[number]
        if node.op_type in ATTRIBUTES:
            name, value = ATTRIBUTES[node.op_type]
            take_attribute(node, name, None)
            node.attribute.append(helper.make_attribute(name, value))
        elif node.op_type in OTHERS:
            node.op_type = OTHERS[node.op_type]
        else:
            _scale_weight(model.graph, node, factor)
        found.append(node)

    edited(source, target, rewrite)
    return found[0]


def _scale_weight(graph: onnx.GraphProto, node: onnx.NodeProto, factor: float) -> None:
    """Of this node alone: a table that others read, too, is copied."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    floats = [index for index, name in enumerate(node.input) if name in tensors and tensors[name].data_type in (1, 10)]
    numbers = numpy_helper.to_array(tensors[node.input[floats[0]]]).copy(order="C")
    flat = numbers.reshape(-1)
    flat[: max(1, len(flat) // 2)] *= np.asarray(factor, numbers.dtype)
    node.input[floats[0]] += "/planted"
    graph.initializer.append(numpy_helper.from_array(numbers, node.input[floats[0]]))
