"""Which nodes of a graph handle large values: those that grow with the text, or are as wide as the vocabulary.

Knows no session, and not which provider runs a node.
"""

from __future__ import annotations

import math

import onnx

from olive_ext.graph.nodes import attribute
from olive_ext.graph.value_shapes import Shapes

SMALL = 64
"""Most elements of a value that is small whatever the text: lengths, shapes, one position."""

_FLOAT = onnx.TensorProto.FLOAT
_FLOATS: dict[int, str] = {
    _FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}
_LENGTHS = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
"""Operators that return int64, whatever they take."""

_TRUTHS = frozenset({"And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor"})


def large_nodes(model: onnx.ModelProto, *, floats_only: bool = False) -> dict[str, str]:
    """Node name -> what it is in words ("GroupQueryAttention '/layers.0/attn' of float32"), for every node with a large
    output. Nodes without a name are left out.

    An output is small where it is known to have at most `SMALL` elements, and where it has integers or truth values in
    two axes at most, besides axes of few elements: token ids, masks and positions come from the host in each step. With
    `floats_only` integers and truth values are small whatever their shape: grids and patches of an encoder, which runs
    once for a picture.
    """
    shapes, types = Shapes(model.graph), _types(model.graph)
    found = {}
    for node in model.graph.node:
        values = [value for value in node.output if value]
        if floats_only:
            values = [value for value in values if types.get(value, _FLOAT) in _FLOATS]
        if node.name and any(_is_large(shapes.of.get(value), types.get(value)) for value in values):
            dtype = next((_FLOATS[types[value]] for value in node.input if types.get(value) in _FLOATS), None)
            found[node.name] = f"{node.op_type} '{node.name}'" + (f" of {dtype}" if dtype else "")
    return found


def _is_large(shape: tuple[int | str | None, ...] | None, elem_type: int | None) -> bool:
    if shape is None:
        return True
    sizes = [axis for axis in shape if isinstance(axis, int)]
    if elem_type is not None and elem_type not in _FLOATS and len(shape) - len(sizes) <= 2:
        return len(shape) > 2 and math.prod(sizes) > SMALL
    return len(sizes) < len(shape) or math.prod(sizes) > SMALL


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    """ONNX element types of values, as far as inputs, weights, annotations and operators determine them."""
    types = {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    for node in graph.node:
        elem_type = _type_of(node, types)
        if elem_type is not None:
            types |= {value: elem_type for value in node.output if value not in types}
    return types


def _type_of(node: onnx.NodeProto, types: dict[str, int]) -> int | None:
    """Of the first output; None where it is not known."""
    if node.op_type == "Cast":
        return int(attribute(node, "to", _FLOAT))
    if node.op_type in _LENGTHS:
        return int(onnx.TensorProto.INT64)
    if node.op_type in _TRUTHS:
        return int(onnx.TensorProto.BOOL)
    if node.op_type in ("Constant", "ConstantOfShape"):
        value = attribute(node, "value", None)
        return int(value.data_type) if value is not None else None
    first = 1 if node.op_type == "Where" else 0
    return next((types[value] for value in node.input[first:] if value in types), None)
