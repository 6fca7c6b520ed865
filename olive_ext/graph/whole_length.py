"""Choices by the length of a step, made by the length of the whole text instead: an input of the graph says it.

A graph with longrope compares a step's largest position, or its mask's width, with a number of positions, and takes the
rotary tables for short or for long texts. Fed in parts, or beside others, a text would get some of its keys from the
one and some from the other. Knows no session and no provider.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from olive_ext.errors import ModelError
from olive_ext.graph.nodes import all_names, remove_dead, subgraphs

Choice = tuple[str, int, int, bool]
"""A value [1, ...] of the graph, its rank, the most positions of a text on the first side, and whether the value is
true for longer ones."""

WHOLE_LENGTH = "olive_ext_whole_length"
"""The input: positions of the texts that the rows of a step are parts of, a scalar."""


def with_whole_length(model: onnx.ModelProto, choices: Sequence[Choice]) -> onnx.ModelProto:
    """`model` itself, in which each of `choices` is made by an input.

    Tables that a choice takes get as many rows as the longest beside them: padded steps and idle rows lie beyond the
    positions of short texts. Raises `ModelError` where a value of the graph has the new input's name.
    """
    graph = model.graph
    if WHOLE_LENGTH in set(all_names(graph)):
        raise ModelError(f"the graph already has a value named '{WHOLE_LENGTH}'")
    for number, (value, rank, length, is_true_beyond) in enumerate(choices):
        node = next(node for node in graph.node if value in node.output)
        replaced, last = f"{value}/olive_ext_of_step", f"{WHOLE_LENGTH}/last_{number}"
        node.output[list(node.output).index(value)] = replaced
        graph.initializer.append(helper.make_tensor(last, TensorProto.INT64, [1] * rank, [length]))
        comparison = "Greater" if is_true_beyond else "LessOrEqual"
        graph.node.insert(0, helper.make_node(comparison, [WHOLE_LENGTH, last], [value], name=value))
        remove_dead(graph, replaced)
        for reader in graph.node:
            if reader.op_type == "If" and reader.input[0] == value:
                _lengthen(reader)
    graph.input.append(helper.make_tensor_value_info(WHOLE_LENGTH, TensorProto.INT64, []))
    return model


def _lengthen(node: onnx.NodeProto) -> None:
    """Repeats the last rows of tables that are shorter than those of the other branch."""
    for tables in zip(*map(_returned_tables, subgraphs(node)), strict=True):
        most = max([table.dims[0] for table in tables if table is not None], default=0)
        for table in tables:
            if table is not None and 0 < table.dims[0] < most:
                rows = numpy_helper.to_array(table)
                longer = np.pad(rows, ((0, most - len(rows)), (0, 0)), "edge")
                table.CopyFrom(numpy_helper.from_array(longer, table.name))


def _returned_tables(body: onnx.GraphProto) -> list[onnx.TensorProto | None]:
    """For each output of `body` the constant of two axes that it is; None for other values."""
    found = {node.output[0]: node.attribute[0] for node in body.node if node.op_type == "Constant"}
    tables = {name: entry.t for name, entry in found.items() if entry.name == "value" and len(entry.t.dims) == 2}
    tables = {name: table for name, table in tables.items() if not table.external_data}
    return [tables.get(output.name) for output in body.output]
