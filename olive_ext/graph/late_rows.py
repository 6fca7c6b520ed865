"""The scored rows, picked as early in the graph as possible: nodes behind the last attention run on these rows only.

The search walks up from the head's rows through nodes that treat positions one by one. It ends at values whose node
mixes positions, or of which another node needs all rows, as the keys and values that the graph returns:

    residual ----------------------+      rows are picked here
    last attention                 |      and here
      product, sum with residual, norm, products of the MLP, sum, norm      on R rows instead of B*S
        head
Which nodes these are says a table of rules; an operator without a rule counts as mixing positions.

Axes: B batch, S positions, R rows that are scored; "rows" are values [.., W] whose leading axes, flattened, are the
positions. Knows no session and no provider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from olive_ext.graph.head_pattern import HeadPattern, NotUnderstood, Walk, domain, label, refusal
from olive_ext.graph.nodes import NodeWriter, attribute, reads
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


class RowPicker:
    """Adds the input `score_rows`[R], int64, indices into the flattened B*S.

    With `has_rows` R is never 0. Without it row 0 is picked where R = 0, because reductions over no rows return the
    wrong shape on CPU, and fail elsewhere.
    """

    def __init__(self, writer: NodeWriter, *, has_rows: bool) -> None:
        self._writer = writer
        self._rows = writer.input("score_rows", onnx.TensorProto.INT64, ["R"])
        if has_rows:
            return
        padded = writer.add("Concat", [self._rows, writer.integers([0])], axis=0)
        candidates = writer.add("Concat", [writer.add("Shape", [self._rows]), writer.integers([1])], axis=0)
        count = writer.reduce("ReduceMax", candidates, keepdims=1)
        self._rows = writer.add("Slice", [padded, writer.integers([0]), count])

    def pick(self, value: str, size: int | None, *, is_flat: bool) -> str:
        """The rows of `value` [.., size]: [R, size] where flat, else [1, R, size], for operators to keep their rank."""
        lead = [-1] if is_flat else [1, -1]
        merged = self._writer.add("Reshape", [value, self._writer.shape(lead, value, size)])
        return self._writer.add("Gather", [merged, self._rows], axis=len(lead) - 1)


@dataclass(frozen=True)
class Picked:
    """A value whose rows are picked: [.., width], [B*S, width] where flat."""

    name: str
    width: int | None
    is_flat: bool


@dataclass(frozen=True)
class LateRows:
    """The part of the graph that can run on the scored rows only."""

    nodes: tuple[onnx.NodeProto, ...]
    """In order of execution."""

    values: tuple[Picked, ...]
    """The values at which the rows are picked."""

    shapes: Mapping[str, Picked]
    """The output of each Reshape among the nodes, by name."""

    products: tuple[tuple[int, int], ...]
    """(inner size, columns) of the products with weights; 0 where a size is not known."""

    last_mixing: tuple[str, ...]
    """Operators whose results are picked because they mix positions: attentions, or others where there is none."""


def find_late_rows(walk: Walk, head: HeadPattern, logits: str) -> LateRows:
    """How far up from `head.rows` rows can be picked; NotUnderstood, with the reason, where nothing is gained."""
    return _Search(walk, head, logits).run()


def move_rows(writer: NodeWriter, picker: RowPicker, late: LateRows) -> dict[str, str]:
    """Adds the nodes of `late` once more, over picked rows; returns the new name of each value."""
    renames = {value.name: picker.pick(value.name, value.width, is_flat=value.is_flat) for value in late.values}
    for node in late.nodes:
        if (made := late.shapes.get(node.output[0])) is not None:
            assert made.width is not None
            shape = writer.integers([-1, made.width] if made.is_flat else [1, -1, made.width])
            renames[made.name] = writer.add("Reshape", [renames[node.input[0]], shape])
        else:
            renames |= writer.clone(node, renames)
    return renames


class _Search:
    def __init__(self, walk: Walk, head: HeadPattern, logits: str) -> None:
        self._walk = walk
        self._rows = head.rows
        self._row_wise = RowWise(walk, head.rows)
        self._whole = {output.name for output in walk.graph.output if output.name != logits}
        """Values of which all positions are needed."""

        self._picked = {head.rows}
        self._reasons: list[str] = []
        self._mixing: list[str] = []

    def run(self) -> LateRows:
        self._check_order()
        moved = [node for node in reversed(self._walk.graph.node) if self._moves(node)][::-1]
        made = {name for node in moved for name in node.output}
        products = [self._sizes(node) for node in moved if self._walk.is_product(node)]
        if not products:
            raise NotUnderstood(self._reasons[0] if self._reasons else f"'{self._rows}' is an input")
        values = [self._value(name) for name in sorted(self._picked - made)]
        shapes = {node.output[0]: self._value(node.output[0]) for node in moved if node.op_type == "Reshape"}
        attentions = [name for name in self._mixing if "Attention" in name]
        last_mixing = tuple(dict.fromkeys(attentions or self._mixing))
        return LateRows(tuple(moved), tuple(values), shapes, tuple(products), last_mixing)

    def _moves(self, node: onnx.NodeProto) -> bool:
        """Whether the node is computed on the scored rows; to be called after all nodes that read its results."""
        wanted = [name for name in node.output if name in self._picked]
        is_whole = not self._whole.isdisjoint(node.output)
        if wanted and not is_whole:
            try:
                carried = self._row_wise.carried(node, wanted)
            except NotUnderstood as error:
                self._reasons.append(str(error))
            else:
                self._picked.update(carried)
                if node.op_type != "Reshape":  # its shape is written anew
                    self._whole.update(value for value in node.input if value and value not in carried)
                return True
        elif wanted:
            self._reasons.append(f"all rows of {label(node)} are needed elsewhere, too")
        if wanted and not self._row_wise.knows(node):
            self._mixing.append(node.op_type)
        if wanted or is_whole:
            self._whole.update(reads([node]))
        return False

    def _value(self, name: str) -> Picked:
        return Picked(name, self._row_wise.width(name), self._row_wise.rank(name) == 2)

    def _sizes(self, node: onnx.NodeProto) -> tuple[int, int]:
        inner, columns = self._walk.sizes(node)
        return inner or 0, columns or 0

    def _check_order(self) -> None:
        later = {name for node in self._walk.graph.node for name in node.output if name}
        for node in self._walk.graph.node:
            if not later.isdisjoint(reads([node])):
                raise NotUnderstood(f"{label(node)} stands before what it reads")
            later.difference_update(node.output)
