"""Recognises how a graph gets from hidden states to logits, so that rows can be picked before the product.

Only reads the graph. "Rows" are the positions of [B, S]; a node is row-wise when each row of its result depends on
the same row of its input alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from olive_ext.graph.edit import subgraphs

_MICROSOFT = "com.microsoft"

PRODUCTS = frozenset(
    {
        ("", "MatMul"),
        ("", "Gemm"),
        ("", "MatMulInteger"),
        ("", "QLinearMatMul"),
        (_MICROSOFT, "FusedMatMul"),
        (_MICROSOFT, "MatMulNBits"),
        (_MICROSOFT, "MatMulBnb4"),
        (_MICROSOFT, "QGemm"),
    }
)
"""Products of rows (input 0) with a weight. All other inputs must be constant."""

ROW_WISE = frozenset(
    {"Add", "Cast", "Clip", "Div", "Identity", "Max", "Min", "Mul", "Neg", "Sub", "Tanh"}
    | {"DequantizeLinear", "QuantizeLinear"}
)
"""Element-wise operators, row-wise as long as their other inputs are constants that are equal for all rows."""

LAYOUT = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that keep the order of the elements; skipped where only B and S are merged or split."""

_QUANTIZE = frozenset({"Cast", "DequantizeLinear", "QuantizeLinear"})
_SAME_DIMS = frozenset({"Cast", "CastLike", "DequantizeLinear", "Identity", "QuantizeLinear"})
_WEIGHT = {"QLinearMatMul": 3, "QGemm": 3}
_TWO_D = frozenset({"Gemm", "QGemm"})


@dataclass(frozen=True)
class Head:
    """The way from `rows`, the value whose rows can be picked, to the logits."""

    rows: str
    nodes: tuple[onnx.NodeProto, ...]
    """In order of execution; each has one output. Nodes of LAYOUT are to be skipped."""

    product: str
    """Operator that multiplies with the vocabulary's weight."""

    is_flat: bool
    """The product takes [B*S, H], not [B, S, H]."""

    hidden_size: int | None
    vocab_size: int | None


class NotUnderstood(Exception):
    """Why rows cannot be picked before the product, in words that end a sentence."""


def find_head(graph: onnx.GraphProto, logits: str, vocab_size: int | None) -> Head:
    """Walks back from `logits`, whose last axis has `vocab_size` elements where known. Raises NotUnderstood."""
    return _Walk(graph, vocab_size).run(logits)


class _Walk:
    def __init__(self, graph: onnx.GraphProto, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
        self._producers: dict[str, onnx.NodeProto] = {name: node for node in graph.node for name in node.output if name}
        self._dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self._constants = _constants(graph)

    def run(self, logits: str) -> Head:
        nodes: list[onnx.NodeProto] = []
        value = logits
        while not self._is_product(node := self._producer(value)):
            nodes.append(node)
            value = self._through(node)
        self._check_product(node)
        hidden_size, width = self._sizes(node)
        if any(other.op_type in LAYOUT for other in nodes) and (width is None or width != self._vocab_size):
            raise NotUnderstood("a reshape behind the product may mix rows: the vocabulary size is unknown")
        nodes.append(node)
        rows = self._above_quantization(node.input[0], nodes)
        vocab_size = self._vocab_size if width is None else width
        return Head(rows, tuple(reversed(nodes)), node.op_type, node.op_type in _TWO_D, hidden_size, vocab_size)

    def _producer(self, value: str) -> onnx.NodeProto:
        if (node := self._producers.get(value)) is None:
            raise NotUnderstood(f"no product with a constant weight was found above '{value}'")
        return node

    def _is_product(self, node: onnx.NodeProto) -> bool:
        return (_domain(node), node.op_type) in PRODUCTS

    def _through(self, node: onnx.NodeProto) -> str:
        """The one input of a row-wise node that carries the rows."""
        if _domain(node) == "" and node.op_type in LAYOUT:
            return str(node.input[0])
        if _domain(node) != "" or node.op_type not in ROW_WISE or len(node.output) != 1:
            raise NotUnderstood(f"{_label(node)} is neither row-wise nor a product with a constant weight")
        carrying: list[str] = [value for value in node.input if value and value not in self._constants]
        if len(carrying) != 1:
            raise NotUnderstood(self._why_variable(node, carrying))
        for value in node.input:
            if value and value != carrying[0] and not self._is_same_for_all_rows(node, value):
                raise NotUnderstood(f"{_label(node)} combines the rows with '{value}', which may differ between rows")
        return carrying[0]

    def _why_variable(self, node: onnx.NodeProto, carrying: Iterable[str]) -> str:
        for value in carrying:
            above = self._producers.get(value)
            candidates = [value, *(above.input if above is not None and above.op_type == "Mul" else ())]
            for name in candidates:
                source = self._producers.get(name)
                if source is not None and source.op_type == "DynamicQuantizeLinear":
                    return f"{_label(source)} quantizes all rows with one scale, so fewer rows give other numbers"
        return f"{_label(node)} combines several values that are not constant"

    def _is_same_for_all_rows(self, node: onnx.NodeProto, value: str) -> bool:
        dims = self._dims_of(value)
        if dims is None:
            return False
        if node.op_type in _QUANTIZE:  # a longer scale belongs to an axis counted from the front
            return all(size == 1 for size in dims)
        return all(size == 1 for size in dims[:-1])

    def _check_product(self, node: onnx.NodeProto) -> None:
        rows, *others = node.input
        source = self._producers.get(rows)
        if source is not None and source.op_type == "DynamicQuantizeLinear":
            raise NotUnderstood(f"{_label(source)} quantizes all rows with one scale, so fewer rows give other numbers")
        variable = [value for value in others if value and value not in self._constants]
        if variable or rows in self._constants:
            raise NotUnderstood(f"{_label(node)} multiplies with '{(variable or [rows])[0]}', which is not constant")
        if any(_attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
            raise NotUnderstood(f"{_label(node)} transposes the rows")
        dims = self._dims_of(node.input[_WEIGHT.get(node.op_type, 1)])
        if "MatMulNBits" not in node.op_type and node.op_type != "MatMulBnb4" and dims is not None and len(dims) != 2:
            raise NotUnderstood(f"{_label(node)} multiplies with a weight of rank {len(dims)}")
        if node.op_type == "Gemm" and len(node.input) > 2 and not self._is_same_for_all_rows(node, node.input[2]):
            raise NotUnderstood(f"{_label(node)} adds '{node.input[2]}', which may differ between rows")

    def _sizes(self, node: onnx.NodeProto) -> tuple[int | None, int | None]:
        """(H, V) as far as they are known."""
        if node.op_type in ("MatMulNBits", "MatMulBnb4"):
            return _attribute(node, "K", None), _attribute(node, "N", None)
        dims = self._dims_of(node.input[_WEIGHT.get(node.op_type, 1)])
        if dims is None:
            return None, None
        return (dims[1], dims[0]) if _attribute(node, "transB", 0) else (dims[0], dims[1])

    def _above_quantization(self, rows: str, nodes: list[onnx.NodeProto]) -> str:
        """Steps over the activation's quantization, which ONNX Runtime fuses with the product."""
        found: list[onnx.NodeProto] = []
        value = rows
        while (node := self._producers.get(value)) is not None and node.op_type in _QUANTIZE:
            try:
                value = self._through(node)
            except NotUnderstood:
                break
            found.append(node)
        if not any(node.op_type == "QuantizeLinear" for node in found):
            return rows
        nodes += found
        return value

    def _dims_of(self, value: str) -> tuple[int, ...] | None:
        """The shape of a constant: stored, or behind operators that keep or permute it."""
        if (known := self._dims.get(value)) is not None:
            return known
        node = self._producers.get(value)
        if node is None:
            return None
        if node.op_type == "Constant":
            return _constant_dims(node)
        source = self._dims_of(node.input[0]) if node.op_type in _SAME_DIMS or node.op_type == "Transpose" else None
        if source is None or node.op_type != "Transpose":
            return source
        order = _attribute(node, "perm", None) or range(len(source))[::-1]
        return tuple(source[axis] for axis in order)


def _constants(graph: onnx.GraphProto) -> set[str]:
    """Values that depend on no graph input."""
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        if node.op_type.startswith("Random") or any(True for _ in subgraphs(node)):
            continue
        if all(not value or value in constants for value in node.input):
            constants.update(node.output)
    return constants


def _constant_dims(node: onnx.NodeProto) -> tuple[int, ...] | None:
    attribute = node.attribute[0]
    if attribute.name == "value":
        return tuple(attribute.t.dims)
    if attribute.name in ("value_float", "value_int"):
        return ()
    if attribute.name in ("value_floats", "value_ints"):
        return (len(attribute.floats) + len(attribute.ints),)
    return None


def _attribute(node: onnx.NodeProto, name: str, default: object) -> Any:
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} '{node.name or node.output[0]}'"
