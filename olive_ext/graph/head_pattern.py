"""The pattern by which a graph gets from hidden states to logits, so that rows can be picked before the product.

Only reads the graph. "Rows" are the positions of [B, S]; a node is row-wise when each row of its result depends on
the same row of its input alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from olive_ext.graph.nodes import attribute, subgraphs
from olive_ext.graph.value_shapes import Shapes

_MICROSOFT = "com.microsoft"

PRODUCTS = frozenset(
    {("", name) for name in ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul")}
    | {(_MICROSOFT, name) for name in ("FusedMatMul", "MatMulNBits", "MatMulBnb4", "QGemm")}
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
_WEIGHT = {"QLinearMatMul": 3, "QGemm": 3}
_TWO_D = frozenset({"Gemm", "QGemm"})
_PACKED = frozenset({"MatMulNBits", "MatMulBnb4"})


@dataclass(frozen=True)
class HeadPattern:
    """The nodes from `rows`, the value whose rows can be picked, to the logits."""

    rows: str
    nodes: tuple[onnx.NodeProto, ...]
    """In order of execution; each has one output. Nodes of LAYOUT are to be skipped."""

    product: str
    """The operator that multiplies with the vocabulary's weight."""

    is_flat: bool
    """The product takes [B*S, H], not [B, S, H]."""

    hidden_size: int | None
    vocab_size: int | None


class NotUnderstood(Exception):
    """Why rows cannot be picked before the product; its text is the end of a sentence."""


class Walk:
    """A graph with the shapes of its values and its constants, and the search for the head in it.

    Shapes and constants are those of the nodes that the graph has when this is made.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.producers: dict[str, onnx.NodeProto] = {name: node for node in graph.node for name in node.output if name}
        self.shapes = Shapes(graph)
        self.constants = _constants(graph)
        """Values that depend on no graph input."""

    def find_head(self, logits: str, vocab_size: int | None) -> HeadPattern:
        """Walks back from `logits`, whose last axis has `vocab_size` elements where known. Raises NotUnderstood."""
        nodes: list[onnx.NodeProto] = []
        value = logits
        while not self.is_product(node := self._producer(value)):
            nodes.append(node)
            value = self._through(node)
        self.check_product(node)
        hidden_size, width = self.sizes(node)
        if any(other.op_type in LAYOUT for other in nodes) and (width is None or width != vocab_size):
            raise NotUnderstood("a reshape after the product may mix rows: the vocabulary size is unknown")
        nodes.append(node)
        rows = self._above_quantization(node.input[0], nodes)
        is_flat = node.op_type in _TWO_D
        vocab_size = vocab_size if width is None else width
        return HeadPattern(rows, tuple(reversed(nodes)), node.op_type, is_flat, hidden_size, vocab_size)

    def _producer(self, value: str) -> onnx.NodeProto:
        if (node := self.producers.get(value)) is None:
            raise NotUnderstood(f"no product with a constant weight was found above '{value}'")
        return node

    def is_product(self, node: onnx.NodeProto) -> bool:
        """Whether the operator may multiply rows with a weight; `check_product` verifies that it does."""
        return (domain(node), node.op_type) in PRODUCTS

    def _through(self, node: onnx.NodeProto) -> str:
        """The one input of a row-wise node that carries the rows."""
        if domain(node) == "" and node.op_type in LAYOUT:
            return str(node.input[0])
        if domain(node) != "" or node.op_type not in ROW_WISE or len(node.output) != 1:
            raise refusal(node, "is neither row-wise nor a product with a constant weight")
        carrying: list[str] = [value for value in node.input if value and value not in self.constants]
        if len(carrying) != 1:
            raise refusal(node, "combines several values that are not constant")
        for value in node.input:
            if value and value != carrying[0] and not self.is_same_for_all_rows(node, value):
                raise refusal(node, f"combines the rows with '{value}', which may differ between rows")
        return carrying[0]

    def is_same_for_all_rows(self, node: onnx.NodeProto, value: str) -> bool:
        """Whether a constant has no axis, or none but the last, along which it may differ."""
        dims = self.shapes.of.get(value)
        if dims is None:
            return False
        if node.op_type in _QUANTIZE:  # a longer scale belongs to an axis counted from the front
            return all(size == 1 for size in dims)
        return all(size == 1 for size in dims[:-1])

    def check_product(self, node: onnx.NodeProto) -> None:
        """Raises NotUnderstood unless each row is multiplied with one constant weight."""
        rows, *others = node.input
        source = self.producers.get(rows)
        if source is not None and source.op_type == "DynamicQuantizeLinear":
            raise refusal(source, "quantizes all rows with one scale, so fewer rows give other numbers")
        variable = [value for value in others if value and value not in self.constants]
        if variable or rows in self.constants:
            raise refusal(node, f"multiplies with '{(variable or [rows])[0]}', which is not constant")
        if any(attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
            raise refusal(node, "transposes the rows")
        dims = self.shapes.of.get(node.input[_WEIGHT.get(node.op_type, 1)])
        if node.op_type not in _PACKED and dims is not None and len(dims) != 2:
            raise refusal(node, f"multiplies with a weight of rank {len(dims)}")
        if node.op_type == "Gemm" and len(node.input) > 2 and not self.is_same_for_all_rows(node, node.input[2]):
            raise refusal(node, f"adds '{node.input[2]}', which may differ between rows")

    def sizes(self, node: onnx.NodeProto) -> tuple[int | None, int | None]:
        """(inner size, columns) of the product's weight, as far as they are known."""
        if node.op_type in _PACKED:
            return attribute(node, "K", None), attribute(node, "N", None)
        dims = self.shapes.of.get(node.input[_WEIGHT.get(node.op_type, 1)]) or (None, None)
        inner, columns = (size if isinstance(size, int) else None for size in dims)
        return (columns, inner) if attribute(node, "transB", 0) else (inner, columns)

    def _above_quantization(self, rows: str, nodes: list[onnx.NodeProto]) -> str:
        """The value before the activation's quantization, whose nodes, fused with the product, go into `nodes`."""
        found: list[onnx.NodeProto] = []
        value = rows
        while (node := self.producers.get(value)) is not None and node.op_type in _QUANTIZE:
            try:
                value = self._through(node)
            except NotUnderstood:
                break
            found.append(node)
        if not any(node.op_type == "QuantizeLinear" for node in found):
            return rows
        nodes += found
        return value


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


def domain(node: onnx.NodeProto) -> str:
    """The node's domain; "" is ONNX's own."""
    return "" if node.domain == "ai.onnx" else node.domain


def label(node: onnx.NodeProto) -> str:
    """Operator and name, for messages."""
    return f"{node.op_type} '{node.name or node.output[0]}'"


def refusal(node: onnx.NodeProto, what: str) -> NotUnderstood:
    """Why `node` keeps rows from being picked: `what` it does."""
    return NotUnderstood(f"{label(node)} {what}")
