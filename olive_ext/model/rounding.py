"""Says where a graph rounds activations, because scores then depend on which tokens are fed together."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from olive_ext.model.attention import attribute

_ONE_SCALE = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})
"""Operators that give all tokens of a step one scale; the second is what ONNX Runtime fuses the first into."""

_INT8 = 4
"""MatMulNBits' accuracy_level that rounds each row's blocks to 8 bits."""


def has_step_scales(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether all tokens of a step share a scale, so that what is fed together changes the numbers."""
    return any(node.op_type in _ONE_SCALE for node in nodes)


def rounds_rows(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether activations are rounded to few bits, each row by itself."""
    return any(_is_by_row(node) for node in nodes)


def _is_by_row(node: onnx.NodeProto) -> bool:
    is_int8 = node.op_type == "MatMulNBits" and attribute(node, "accuracy_level", 0) == _INT8
    return is_int8 or node.op_type == "QuantizeLinear"


def rounding_notes(nodes: Iterable[onnx.NodeProto]) -> list[str]:
    """One sentence for each kind of rounding; none where activations stay as they are."""
    one_scale = by_row = 0
    for node in nodes:
        one_scale += node.op_type in _ONE_SCALE
        by_row += _is_by_row(node)
    notes = []
    if one_scale:
        notes.append(
            f"the activations of all tokens of a step are quantized with one scale ({one_scale} nodes): each request "
            "is fed whole and alone, because chunks, shared prefixes and batches would change its scores"
        )
    if by_row:
        notes.append(
            f"activations are rounded to few bits, each row by itself ({by_row} nodes, MatMulNBits of accuracy_level "
            "4 or QuantizeLinear): a difference in the last bit, as between one token a step and several, can grow to "
            "hundredths or tenths of a nat"
        )
    return notes
