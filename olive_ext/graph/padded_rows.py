"""Encoders that return as many rows of features as an item has, whatever the shape of their inputs: with rows of
padding behind them, their outputs have few shapes. Knows no item."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import GraphProto, ModelProto, TensorProto, helper

from olive_ext.graph.nodes import NodeWriter, default_opset

NUM_ROWS = "num_real_rows"
"""The output that has the number of rows that are not of padding, [1]."""


def pad_rows(model: ModelProto, places: str, outputs: Sequence[str]) -> None:
    """Makes an encoder's `outputs` [rows, size] to [1, places, size], with zeros behind the rows, and adds the output
    `NUM_ROWS`. There are as many places as the first two axes of the input `places` have."""
    graph = model.graph
    writer = NodeWriter(graph, default_opset(model), "padded_rows")
    first, second = writer.integers([0]), writer.integers([1])
    sizes = writer.add("Slice", [writer.add("Shape", [places]), first, writer.integers([2])])
    most = writer.add("ReduceProd", [sizes], keepdims=1)
    for name in outputs:
        own = f"{name}_of_rows"
        _rename(graph, name, own)
        rows = writer.add("Slice", [writer.add("Shape", [own]), first, second])
        more = writer.add("Max", [writer.add("Sub", [most, rows]), first])
        ends = writer.add("Concat", [first, first, more, first], axis=0)
        writer.add("Unsqueeze", [writer.add("Pad", [own, ends]), first], name)
        if name == outputs[0]:
            writer.add("Identity", [rows], NUM_ROWS)
    for value in graph.output:
        if value.name in outputs:
            kind = value.type.tensor_type
            shape: list[int | str | None] = [1, "places", kind.shape.dim[-1].dim_value]
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind.elem_type, shape))
    graph.output.append(helper.make_tensor_value_info(NUM_ROWS, TensorProto.INT64, [1]))


def _rename(graph: GraphProto, name: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if taken == name else taken for taken in node.input]
        node.output[:] = [new if made == name else made for made in node.output]
