"""Where the rows that are scored can be picked in a graph: after the last operator that mixes positions, or before the
product that makes the logits.

Only reads the graph. "Rows" are the positions of [B, S]; a node is row-wise when each row of its result depends on
the same row of its inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx

from olive_ext.graph.nodes import attribute, reads, subgraphs
from olive_ext.graph.value_shapes import ELEMENT_WISE, NORMS, REDUCTIONS, SKIP_NORMS, Shapes, factors

_MICROSOFT = "com.microsoft"

_PRODUCTS = frozenset(
    {("", name) for name in ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul")}
    | {(_MICROSOFT, name) for name in ("FusedMatMul", "MatMulNBits", "MatMulBnb4", "QGemm")}
)
"""Products of rows (input 0) with a weight. All other inputs must be constant."""

_ELEMENT_WISE = ELEMENT_WISE | {"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"}
"""Row-wise as long as their constant inputs are equal for all rows."""

LAYOUT = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that keep the order of the elements; skipped where only B and S are merged or split."""

_QUANTIZE = frozenset({"Cast", "DequantizeLinear", "QuantizeLinear"})
_WEIGHT = {"QLinearMatMul": 3, "QGemm": 3}
_TWO_D = frozenset({"Gemm", "QGemm"})
_PACKED = frozenset({"MatMulNBits", "MatMulBnb4"})
_OF_FLOATS = frozenset({"FusedMatMul", "Gemm", "MatMul", "MatMulBnb4", "MatMulNBits"})
"""Products of floats: those of integers may have a scale or a zero point for each row."""

_SUM_AT = 3
"""Skip*LayerNormalization's output that is the sum before the norm."""


@dataclass(frozen=True)
class PickedRows:
    """The values at which rows are picked, and what is computed of them alone."""

    kind: Literal["hidden", "logits"]
    """Hidden states, before the product with the vocabulary or further up, or the logits."""

    reason: str
    """One sentence for `olive-ext check`: which pattern was recognised, or why none was."""

    vocab_size: int | None
    """None where neither the logits' shape nor the weight's is known."""

    values: Mapping[str, tuple[int | None, bool]]
    """By the values their last axis, where it is known, and whether it is the only one after one axis of rows."""

    nodes: Sequence[onnx.NodeProto] = ()
    """The nodes from `values` to the logits, in order of execution. Those of `LAYOUT` without a shape are skipped."""

    shapes: Mapping[str, list[int]] = field(default_factory=dict)
    """By the outputs of reshapes the shapes that they have with the picked rows."""

    products: tuple[tuple[int, int], ...] = ()
    """(inner size, columns) of the products with weights besides the head's; 0 where a size is not known."""


class NotUnderstood(Exception):
    """Why rows cannot be picked further up; its text is the end of a sentence."""


def find_rows(graph: onnx.GraphProto, logits: str, vocab_size: int | None, keeps_layers: str) -> PickedRows:
    """Where rows are picked for `logits`, whose last axis has `vocab_size` elements where known; not above the head
    where there is a reason for it in `keeps_layers`."""
    walk = Walk(graph)
    try:
        head = walk.find_head(logits, vocab_size)
    except NotUnderstood as error:
        return PickedRows(
            "logits", f"rows are picked from the logits: {error}", vocab_size, {logits: (vocab_size, True)}
        )
    try:
        if keeps_layers:
            raise NotUnderstood(keeps_layers)
        return walk.find_late_rows(head, logits)
    except NotUnderstood as error:
        return replace(head, reason=f"{head.reason}, and not further up: {error}")


class Walk:
    """A graph with the shapes of its values and its constants, and the search for rows in it. The methods of rules say
    which inputs carry the rows, and raise NotUnderstood where a node may mix them.

    Shapes and constants are those of the nodes that the graph has when this is made.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self.producers: dict[str, onnx.NodeProto] = {name: node for node in graph.node for name in node.output if name}
        self._shapes = Shapes(graph)
        self._of = self._shapes.of
        self._constants = _constants(graph)
        self._positions: tuple[int | str, ...] = ()
        """The lengths of the axes of rows."""

    def find_head(self, logits: str, vocab_size: int | None) -> PickedRows:
        """The value before the product that computes `logits`, whose last axis has `vocab_size` elements where known,
        and the nodes from there on, each of one output. Raises NotUnderstood."""
        nodes: list[onnx.NodeProto] = []
        value = logits
        while True:
            if (node := self.producers.get(value)) is None:
                raise NotUnderstood(f"no product with a constant weight was found above '{value}'")
            if (domain(node), node.op_type) in _PRODUCTS:
                break
            nodes.append(node)
            value = self._through(node)
        self._product(node)
        hidden_size, width = self._sizes(node)
        if any(other.op_type in LAYOUT for other in nodes) and (width is None or width != vocab_size):
            raise NotUnderstood("a reshape after the product may mix rows: the vocabulary size is unknown")
        nodes.append(node)
        picked = {self._above_quantization(node.input[0], nodes): (hidden_size, node.op_type in _TWO_D)}
        reason = f"rows are picked before {node.op_type}, which computes the logits"
        return PickedRows("hidden", reason, vocab_size if width is None else width, picked, nodes[::-1])

    def _through(self, node: onnx.NodeProto) -> str:
        """The one input of a row-wise node that carries the rows."""
        if domain(node) == "" and node.op_type in LAYOUT:
            return str(node.input[0])
        if domain(node) != "" or node.op_type not in _ELEMENT_WISE:
            raise refusal(node, "is neither row-wise nor a product with a constant weight")
        carrying = self._element_wise(node)
        if len(carrying) != 1:
            raise refusal(node, "combines several values that are not constant")
        return carrying[0]

    def _above_quantization(self, rows: str, nodes: list[onnx.NodeProto]) -> str:
        """The value before the activation's quantization, whose nodes, fused with the product, go into `nodes`."""
        value = rows
        while (node := self.producers.get(value)) is not None and node.op_type in _QUANTIZE:
            try:
                value = self._through(node)
            except NotUnderstood:
                break
            nodes.append(node)
        return value

    def find_late_rows(self, head: PickedRows, logits: str) -> PickedRows:
        """How far up from the `head` rows can be picked. Raises NotUnderstood where nothing is gained.

        The search walks up through nodes that treat positions one by one. It ends at values whose node mixes positions,
        or of which another node needs all rows, as the keys and values that the graph returns:

            residual ----------------------+      rows are picked here
            last attention                 |      and here
              product, sum with residual, norm, products of the MLP, sum, norm      on R rows instead of B*S
                head

        A table of rules says which nodes these are; an operator without a rule counts as mixing positions.
        """
        later = {name for node in self._graph.node for name in node.output if name}
        for node in self._graph.node:
            if not later.isdisjoint(reads([node])):
                raise NotUnderstood(f"{label(node)} stands before what it reads")
            later.difference_update(node.output)
        (rows,) = head.values
        shape = self._of.get(rows)
        self._positions = (() if shape is None else factors(shape[:-1])) or ()
        if not self._positions:
            raise NotUnderstood(f"the shape of '{rows}' is not known")
        whole, picked = {output.name for output in self._graph.output if output.name != logits}, {rows}
        moved: list[onnx.NodeProto] = []
        reasons: list[str] = []
        mixing: list[str] = []
        for node in reversed(self._graph.node):  # after all that read its results; `whole` is needed of all positions
            wanted, is_whole = [name for name in node.output if name in picked], not whole.isdisjoint(node.output)
            if wanted and not is_whole:
                try:
                    carried = self._carried(node, wanted)
                except NotUnderstood as error:
                    reasons.append(str(error))
                else:
                    picked.update(carried)
                    moved.append(node)
                    if node.op_type != "Reshape":  # its shape is written anew
                        whole.update(value for value in node.input if value and value not in carried)
                    continue
            elif wanted:
                reasons.append(f"all rows of {label(node)} are needed elsewhere, too")
            if wanted and not _has_rule(node):
                mixing.append(node.op_type)
            if wanted or is_whole:
                whole.update(reads([node]))
        sizes = [self._sizes(node) for node in reversed(moved) if (domain(node), node.op_type) in _PRODUCTS]
        if not sizes:
            raise NotUnderstood(reasons[0] if reasons else f"'{rows}' is an input")
        made = {name for node in moved for name in node.output}
        values = {value: (self._width(value), self._rank(value) == 2) for value in sorted(picked - made)}
        products = tuple((inner or 0, columns or 0) for inner, columns in sizes)
        last = dict.fromkeys([name for name in mixing if "Attention" in name] or mixing)
        where = f"after the last {' and '.join(last) or 'operator that mixes positions'}"
        run = f"{len(sizes)} {'product runs' if len(sizes) == 1 else 'products run'} on scored rows only"
        product = next(node.op_type for node in head.nodes if (domain(node), node.op_type) in _PRODUCTS)
        reason = f"rows are picked {where}: besides the head's {product}, {run}"
        nodes = (*reversed(moved), *head.nodes)
        split = [name for node in moved if node.op_type == "Reshape" for name in node.output]
        widths = {name: width for name in split if (width := self._width(name)) is not None}
        shapes = {name: [-1, width] if self._rank(name) == 2 else [1, -1, width] for name, width in widths.items()}
        return PickedRows("hidden", reason, head.vocab_size, values, nodes, shapes, products)

    def _is_rows(self, value: str) -> bool:
        """Whether `value` is known to have the positions on its leading axes, and one axis after them."""
        shape = self._of.get(value)
        if shape is None or value in self._constants or len(shape) not in (2, 3):
            return False
        return factors(shape[:-1]) == self._positions

    def _rank(self, value: str) -> int:
        """3 for [B, S, W], 2 for [B*S, W]."""
        return len(self._of[value])

    def _width(self, value: str) -> int | None:
        """W, where it is known."""
        last = self._of[value][-1]
        return last if isinstance(last, int) else None

    def _carried(self, node: onnx.NodeProto, outputs: Sequence[str]) -> list[str]:
        """The inputs that carry the rows where `outputs` are read."""
        if not _has_rule(node):
            raise refusal(node, "is not known to treat positions one by one")
        carriers = _RULES[node.op_type](self, node)
        if not carriers or not all(self._is_rows(value) for value in (*carriers, *outputs)):
            raise refusal(node, "has values of which it is not known that they hold the positions")
        if node.op_type != "Reshape" and len({self._rank(value) for value in (*carriers, *outputs)}) != 1:
            raise refusal(node, "changes the number of axes")
        unknown = [name for number, name in enumerate(node.output) if name in outputs and number not in (0, _SUM_AT)]
        if unknown and node.op_type != "Split":
            raise refusal(node, f"has the output '{unknown[0]}' in use")
        return carriers

    def _element_wise(self, node: onnx.NodeProto) -> list[str]:
        for value in node.input:
            if value in self._constants and not self._is_same_for_all_rows(node, value):
                raise refusal(node, f"combines the rows with '{value}', which may differ between rows")
        return [value for value in node.input if value and value not in self._constants]

    def _is_same_for_all_rows(self, node: onnx.NodeProto, value: str) -> bool:
        """Whether a constant has no axis, or none but the last, along which it may differ."""
        dims = self._of.get(value)
        if dims is None:
            return False
        if node.op_type in _QUANTIZE:  # a longer scale belongs to an axis counted from the front
            return all(size == 1 for size in dims)
        return all(size == 1 for size in dims[:-1])

    def _product(self, node: onnx.NodeProto) -> list[str]:
        """Each row is multiplied with one constant weight."""
        rows, *others = node.input
        source = self.producers.get(rows)
        if source is not None and source.op_type == "DynamicQuantizeLinear":
            raise refusal(source, "quantizes all rows with one scale, so fewer rows give other numbers")
        variable = [value for value in others if value and value not in self._constants]
        if variable or rows in self._constants:
            raise refusal(node, f"multiplies with '{(variable or [rows])[0]}', which is not constant")
        if any(attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
            raise refusal(node, "transposes the rows")
        dims = self._of.get(node.input[_WEIGHT.get(node.op_type, 1)])
        if node.op_type not in _PACKED and dims is not None and len(dims) != 2:
            raise refusal(node, f"multiplies with a weight of rank {len(dims)}")
        if node.op_type == "Gemm" and len(node.input) > 2 and not self._is_same_for_all_rows(node, node.input[2]):
            raise refusal(node, f"adds '{node.input[2]}', which may differ between rows")
        return [rows]

    def _sizes(self, node: onnx.NodeProto) -> tuple[int | None, int | None]:
        """(inner size, columns) of the product's weight, as far as they are known."""
        if node.op_type in _PACKED:
            return attribute(node, "K", None), attribute(node, "N", None)
        dims = self._of.get(node.input[_WEIGHT.get(node.op_type, 1)]) or (None, None)
        inner, columns = (size if isinstance(size, int) else None for size in dims)
        return (columns, inner) if attribute(node, "transB", 0) else (inner, columns)

    def _norm(self, node: onnx.NodeProto) -> list[str]:
        """The first input, or two where a norm adds them; the others must be constants of one axis."""
        num_rows = 2 if node.op_type in SKIP_NORMS else 1
        if self._is_rows(node.input[0]) and attribute(node, "axis", -1) not in (-1, self._rank(node.input[0]) - 1):
            raise refusal(node, "does not only normalize the last axis")
        for value in node.input[num_rows:]:
            if value and (value not in self._constants or len(self._of.get(value, (0, 0))) != 1):
                raise refusal(node, f"has the parameter '{value}', which may differ between rows")
        return list(node.input[:num_rows])

    def _reduction(self, node: onnx.NodeProto) -> list[str]:
        axes = self._shapes.listed(node, "axes", 1)
        return self._on_last_axis(node, axes if attribute(node, "keepdims", 1) else None)

    def _slice(self, node: onnx.NodeProto) -> list[str]:
        return self._on_last_axis(node, self._shapes.listed(node, "axes", 3))

    def _split(self, node: onnx.NodeProto) -> list[str]:
        return self._on_last_axis(node, (attribute(node, "axis", 0),))

    def _on_last_axis(self, node: onnx.NodeProto, axes: Sequence[object] | None) -> list[str]:
        rows, *others = node.input
        is_last = self._is_rows(rows) and axes is not None and tuple(axes) in ((-1,), (self._rank(rows) - 1,))
        if not is_last or any(value and value not in self._constants for value in others):
            raise refusal(node, "does not keep to the last axis")
        return [rows]

    def _concat(self, node: onnx.NodeProto) -> list[str]:
        ranks = {self._rank(value) for value in node.input if self._is_rows(value)}
        if len(ranks) != 1 or attribute(node, "axis", 0) not in (-1, ranks.pop() - 1):
            raise refusal(node, "does not keep to the last axis")
        return list(node.input)

    def _reshape(self, node: onnx.NodeProto) -> list[str]:
        """A reshape that merges or splits B and S, and keeps the rows' width."""
        rows, result = node.input[0], node.output[0]
        if not (self._is_rows(rows) and self._is_rows(result)) or self._width(rows) is None:
            raise refusal(node, "is not known to keep the rows")
        if self._width(rows) != self._width(result):
            raise refusal(node, "changes the width of the rows")
        return [rows]


_RULES: dict[str, Callable[[Walk, onnx.NodeProto], list[str]]] = {
    **dict.fromkeys(_ELEMENT_WISE, Walk._element_wise),
    **dict.fromkeys(_OF_FLOATS, Walk._product),
    **dict.fromkeys((*NORMS, *SKIP_NORMS), Walk._norm),
    **dict.fromkeys(REDUCTIONS, Walk._reduction),
    "Concat": Walk._concat,
    "Reshape": Walk._reshape,
    "Slice": Walk._slice,
    "Split": Walk._split,
}


def _has_rule(node: onnx.NodeProto) -> bool:
    return domain(node) in ("", _MICROSOFT) and node.op_type in _RULES


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
