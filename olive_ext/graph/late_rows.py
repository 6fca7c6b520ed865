"""Lets what follows the last attention run on the scored rows only: finds where rows can be picked, and moves the pick.

A walk from the head's rows up, through nodes that treat positions one by one. It ends at values whose node mixes
positions, or which something else needs whole, as the keys and values that the graph returns:

    residual ----------------------+      picked here
    last attention                 |      picked here
      product, sum with residual, norm, products of the MLP, sum, norm      on R rows instead of B*S
        head
Knows no session and no provider.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from olive_ext.graph.edit import NodeWriter, reads
from olive_ext.graph.gather_rows import RowPicker
from olive_ext.graph.head_pattern import Head, NotUnderstood, Walk, label
from olive_ext.graph.row_wise import RowWise


@dataclass(frozen=True)
class Picked:
    """A value whose rows are picked: [.., width], [B*S, width] where flat."""

    name: str
    width: int | None
    is_flat: bool


@dataclass(frozen=True)
class LateRows:
    """What can run on the scored rows, in order of execution."""

    nodes: tuple[onnx.NodeProto, ...]
    values: tuple[Picked, ...]
    """Where the rows are picked."""

    shapes: Mapping[str, Picked]
    """What a Reshape among the nodes makes."""

    products: tuple[tuple[int, int], ...]
    """(inner size, columns) of the products with weights; 0 where a size is not known."""

    behind: tuple[str, ...]
    """Operators whose results are picked because they mix positions: attentions, or others where there is none."""


def find_late_rows(graph: onnx.GraphProto, head: Head, logits: str) -> LateRows:
    """How far up from `head.rows` rows can be picked. Raises NotUnderstood where no product with a weight is gained,
    with the reason nearest to the head."""
    return _Search(graph, head, logits).run()


def move_rows(writer: NodeWriter, picker: RowPicker, late: LateRows) -> dict[str, str]:
    """Writes the nodes once more, over picked rows; answers with what each value is called there."""
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
    def __init__(self, graph: onnx.GraphProto, head: Head, logits: str) -> None:
        self._graph = graph
        self._walk = Walk(graph, None)
        self._rows = head.rows
        self._row_wise = RowWise(self._walk, head.rows)
        self._whole = {output.name for output in graph.output if output.name != logits}
        """Values that are needed for all positions."""

        self._picked = {head.rows}
        self._reasons: list[str] = []
        self._mixing: list[str] = []

    def run(self) -> LateRows:
        self._check_order()
        moved = [node for node in reversed(self._graph.node) if self._moves(node)][::-1]
        made = {name for node in moved for name in node.output}
        products = [self._sizes(node) for node in moved if self._walk.is_product(node)]
        if not products:
            raise NotUnderstood(self._reasons[0] if self._reasons else f"'{self._rows}' is an input")
        values = [self._value(name) for name in sorted(self._picked - made)]
        shapes = {node.output[0]: self._value(node.output[0]) for node in moved if node.op_type == "Reshape"}
        return LateRows(tuple(moved), tuple(values), shapes, tuple(products), self._behind())

    def _behind(self) -> tuple[str, ...]:
        """The attention, and what stands for it where there is none."""
        attentions = [name for name in self._mixing if "Attention" in name]
        return tuple(dict.fromkeys(attentions or self._mixing))

    def _moves(self, node: onnx.NodeProto) -> bool:
        """Whether the node is computed on the scored rows; all that read its results have been asked."""
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
        later = {name for node in self._graph.node for name in node.output if name}
        for node in self._graph.node:
            if not later.isdisjoint(reads([node])):
                raise NotUnderstood(f"{label(node)} stands before what it reads")
            later.difference_update(node.output)
