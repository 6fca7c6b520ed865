"""Operators that treat every position by itself, so that they compute the same of a few rows as of all.

A table of rules; an operator without a rule counts as mixing positions. "Rows" are values [.., W] whose leading axes,
flattened, are the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx

from olive_ext.graph.head_pattern import NotUnderstood, Walk, domain, refusal
from olive_ext.graph.nodes import attribute
from olive_ext.graph.symbolic_dims import factors
from olive_ext.graph.value_shapes import REDUCTIONS, SKIP_NORMS

_ELEMENT_WISE = frozenset(
    {"Abs", "Add", "BiasGelu", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "FastGelu", "Gelu", "HardSigmoid"}
    | {"HardSwish", "Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "QuickGelu"}
    | {"Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh"}
    | {"DequantizeLinear", "QuantizeLinear"}
)
_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
_PRODUCTS = frozenset({"FusedMatMul", "Gemm", "MatMul", "MatMulBnb4", "MatMulNBits"})
"""Products of floats: those of integers may have a scale or a zero point for each row."""

_DOMAINS = frozenset({"", "com.microsoft"})
_SUM_AT = 3
"""Skip*LayerNormalization's output that is the sum before the norm."""


class RowWise:
    """The rules, applied to the nodes of one graph. `rows` is a value whose leading axes are the positions."""

    def __init__(self, walk: Walk, rows: str) -> None:
        self._walk = walk
        self._of = walk.shapes.of
        shape = self._of.get(rows)
        key = None if shape is None else factors(shape[:-1])
        if shape is None or not key:
            raise NotUnderstood(f"the shape of '{rows}' is not known")
        self._key = key

    def is_rows(self, value: str) -> bool:
        """Whether `value` is known to have the positions on its leading axes, and one axis behind them."""
        shape = self._of.get(value)
        if shape is None or value in self._walk.constants or len(shape) not in (2, 3):
            return False
        return factors(shape[:-1]) == self._key

    def rank(self, value: str) -> int:
        """3 for [B, S, W], 2 for [B*S, W]."""
        return len(self._of[value])

    def width(self, value: str) -> int | None:
        """W, where it is known."""
        last = self._of[value][-1]
        return last if isinstance(last, int) else None

    def knows(self, node: onnx.NodeProto) -> bool:
        """Whether there is a rule for the node's operator."""
        return domain(node) in _DOMAINS and node.op_type in _RULES

    def carried(self, node: onnx.NodeProto, outputs: Sequence[str]) -> list[str]:
        """The inputs that carry the rows where `outputs` are read. NotUnderstood where there is no rule for it."""
        if not self.knows(node):
            raise refusal(node, "is not known to treat positions one by one")
        found = _RULES[node.op_type](self, node)
        if not found or not all(self.is_rows(value) for value in (*found, *outputs)):
            raise refusal(node, "has values of which it is not known that they hold the positions")
        if node.op_type != "Reshape" and len({self.rank(value) for value in (*found, *outputs)}) != 1:
            raise refusal(node, "changes the number of axes")
        unknown = [name for number, name in enumerate(node.output) if name in outputs and number not in (0, _SUM_AT)]
        if unknown and node.op_type != "Split":
            raise refusal(node, f"has the output '{unknown[0]}' in use")
        return found

    def _element_wise(self, node: onnx.NodeProto) -> list[str]:
        found: list[str] = [value for value in node.input if value and value not in self._walk.constants]
        rank = max((self.rank(value) for value in found if self.is_rows(value)), default=0)
        for value in node.input:
            if not value or value in found:
                continue
            shape = self._of.get(value)
            if shape is None or len(shape) > rank or not self._walk.is_same_for_all_rows(node, value):
                raise refusal(node, f"combines the rows with '{value}', which may differ between rows")
        return found

    def _norm(self, node: onnx.NodeProto) -> list[str]:
        if self.is_rows(node.input[0]) and attribute(node, "axis", -1) not in (-1, self.rank(node.input[0]) - 1):
            raise refusal(node, "does not only normalize the last axis")
        return self._with_parameters(node, 1)

    def _skip_norm(self, node: onnx.NodeProto) -> list[str]:
        return self._with_parameters(node, 2)

    def _with_parameters(self, node: onnx.NodeProto, num_rows: int) -> list[str]:
        """The first `num_rows` inputs; the others must be constants of one axis."""
        for value in node.input[num_rows:]:
            if value and (value not in self._walk.constants or len(self._of.get(value, (0, 0))) != 1):
                raise refusal(node, f"has the parameter '{value}', which may differ between rows")
        return list(node.input[:num_rows])

    def _product(self, node: onnx.NodeProto) -> list[str]:
        self._walk.check_product(node)
        return [node.input[0]]

    def _reduction(self, node: onnx.NodeProto) -> list[str]:
        axes = self._walk.shapes.listed(node, "axes", 1)
        return self._on_last_axis(node, axes if attribute(node, "keepdims", 1) else None)

    def _slice(self, node: onnx.NodeProto) -> list[str]:
        return self._on_last_axis(node, self._walk.shapes.listed(node, "axes", 3))

    def _split(self, node: onnx.NodeProto) -> list[str]:
        return self._on_last_axis(node, (attribute(node, "axis", 0),))

    def _on_last_axis(self, node: onnx.NodeProto, axes: Sequence[object] | None) -> list[str]:
        rows, *others = node.input
        is_last = self.is_rows(rows) and axes is not None and tuple(axes) in ((-1,), (self.rank(rows) - 1,))
        if not is_last or any(value and value not in self._walk.constants for value in others):
            raise refusal(node, "does not keep to the last axis")
        return [rows]

    def _concat(self, node: onnx.NodeProto) -> list[str]:
        ranks = {self.rank(value) for value in node.input if self.is_rows(value)}
        if len(ranks) != 1 or attribute(node, "axis", 0) not in (-1, ranks.pop() - 1):
            raise refusal(node, "does not keep to the last axis")
        return list(node.input)

    def _reshape(self, node: onnx.NodeProto) -> list[str]:
        """A reshape that merges or splits B and S, and keeps the rows' width."""
        rows, result = node.input[0], node.output[0]
        if not (self.is_rows(rows) and self.is_rows(result)) or self.width(rows) is None:
            raise refusal(node, "is not known to keep the rows")
        if self.width(rows) != self.width(result):
            raise refusal(node, "changes the width of the rows")
        return [rows]


_RULES: dict[str, Callable[[RowWise, onnx.NodeProto], list[str]]] = {
    **dict.fromkeys(_ELEMENT_WISE, RowWise._element_wise),
    **dict.fromkeys(_PRODUCTS, RowWise._product),
    **dict.fromkeys(_NORMS, RowWise._norm),
    **dict.fromkeys(SKIP_NORMS, RowWise._skip_norm),
    **dict.fromkeys(REDUCTIONS, RowWise._reduction),
    "Concat": RowWise._concat,
    "Reshape": RowWise._reshape,
    "Slice": RowWise._slice,
    "Split": RowWise._split,
}
