"""Rewrites of attention nodes in a decoder as exported: full-length KV caches, and a bias where a kernel needs one.

Knows no session and no provider.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx

from olive_ext.graph.nodes import attribute

ATTRIBUTE = "sliding_window_cache"
PAST_LENGTH = "past_sequence_length"
TOTAL_LENGTH = "total_sequence_length"
"""The names that exporters give to the lengths of full caches."""

_ITEM_BYTES: dict[int, int] = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.FLOAT16: 2, onnx.TensorProto.BFLOAT16: 2}


def with_full_length_kv(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` in which every GroupQueryAttention keeps all positions, so that slots can be rewound, batched
    and shared; `model` itself where all attentions do so already.

    A layer with sliding_window_cache=1 keeps its last positions only and drops the others as it goes. Without the
    attribute the same layer keeps all positions and attends to the same window (local_window_size stays), so
    the results are equal. The caches' third axis is renamed as in layers without a window; weights stay where they are.
    """
    if not _windowed(model.graph):
        return model
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    graph = edited.graph
    for node in _windowed(graph):
        del node.attribute[[entry.name for entry in node.attribute].index(ATTRIBUTE)]
        _rename_length(graph.input, node.input[3:5], PAST_LENGTH)
        _rename_length((*graph.output, *graph.value_info), node.output[1:3], TOTAL_LENGTH)
    return edited


def _windowed(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == "GroupQueryAttention" and attribute(node, ATTRIBUTE, 0)]


def _rename_length(values: Iterable[onnx.ValueInfoProto], names: Iterable[str], length: str) -> None:
    wanted = set(names)
    for value in values:
        if value.name in wanted and len(value.type.tensor_type.shape.dim) == 4:
            value.type.tensor_type.shape.dim[2].dim_param = length  # replaces a fixed number, too


def with_attention_bias(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` itself, in which every com.microsoft Attention without a bias now has one of zeros.

    Without a bias ONNX Runtime's CPU kernel crashes; onnxruntime-genai's builder leaves out a bias that is all zeros.
    """
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.domain != "com.microsoft" or node.op_type != "Attention" or (len(node.input) > 2 and node.input[2]):
            continue
        weight = weights.get(node.input[1])
        if weight is None:
            continue
        bias = onnx.TensorProto(name=f"{weight.name}/olive_ext_no_bias", data_type=weight.data_type)
        bias.dims.append(weight.dims[-1])
        bias.raw_data = bytes(math.prod(bias.dims) * _ITEM_BYTES[weight.data_type])
        graph.initializer.append(bias)
        node.input[:] = [*node.input[:2], bias.name, *node.input[3:]]
    return model
