"""The scored rows, picked as early in the graph as possible: nodes behind the last attention run on these rows only.

The search walks up from the head's rows through nodes that treat positions one by one. It ends at values whose node
mixes positions, or of which another node needs all rows, as the keys and values that the graph returns:

    residual ----------------------+      rows are picked here
    last attention                 |      and here
      product, sum with residual, norm, products of the MLP, sum, norm      on R rows instead of B*S
        head
Axes: B batch, S positions, R rows that are scored. Knows no session and no provider.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from olive_ext.graph.head_pattern import HeadPattern, NotUnderstood, Walk, label
from olive_ext.graph.nodes import NodeWriter, reads
from olive_ext.graph.row_wise_operators import RowWise


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
