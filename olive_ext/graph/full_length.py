"""Gives a decoder with windowed KV caches full-length ones, so that slots can be rewound, batched and shared.

A layer with sliding_window_cache=1 keeps its last positions only and drops the others as it goes; without the attribute
the same layer keeps all and looks at the same window (local_window_size stays), so the results are equal.
Knows no session and no provider.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

ATTRIBUTE = "sliding_window_cache"
PAST_LENGTH = "past_sequence_length"
TOTAL_LENGTH = "total_sequence_length"
"""The names that exporters give to the lengths of full caches."""


def with_full_length_kv(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` in which every GroupQueryAttention keeps all positions; `model` itself where they do already.

    The caches' third axis is renamed as in layers without a window; weights stay where they are.
    """
    if not any(True for _ in _windowed(model.graph)):
        return model
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    graph = edited.graph
    for node in _windowed(graph):
        del node.attribute[[entry.name for entry in node.attribute].index(ATTRIBUTE)]
        _rename_length(graph.input, node.input[3:5], PAST_LENGTH)
        _rename_length((*graph.output, *graph.value_info), node.output[1:3], TOTAL_LENGTH)
    return edited


def _windowed(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        if node.op_type == "GroupQueryAttention" and any(
            entry.name == ATTRIBUTE and entry.i for entry in node.attribute
        ):
            yield node


def _rename_length(values: Iterable[onnx.ValueInfoProto], names: Iterable[str], length: str) -> None:
    wanted = set(names)
    for value in values:
        if value.name in wanted and len(value.type.tensor_type.shape.dim) == 4:
            value.type.tensor_type.shape.dim[2].dim_param = length  # replaces a fixed number, too
