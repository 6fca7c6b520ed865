"""Rewrites of attention in graphs as exported: full-length KV caches, a bias where a kernel needs one, and the part of
a decoder that computes the cross-attention KV as a model of its own. Knows no session and no provider.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from copy import deepcopy

import onnx
from onnx import helper

from olive_ext.graph.nodes import attribute, nodes_behind, reads, take_attribute

ATTRIBUTE = "sliding_window_cache"
PAST_LENGTH = "past_sequence_length"
TOTAL_LENGTH = "total_sequence_length"
"""The names that exporters give to the lengths of full caches."""

_ITEM_BYTES: dict[int, int] = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.FLOAT16: 2, onnx.TensorProto.BFLOAT16: 2}

_HAS_PAST = "use_cache_branch"
"""The input by which a merged decoder chooses between its two graphs."""


def with_full_length_kv(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` in which every GroupQueryAttention keeps all positions, so that slots can be rewound, batched
    and shared; `model` itself where all attentions do so already.

    A layer with sliding_window_cache=1 keeps its last positions only and drops the others as it goes. Without the
    attribute the same layer keeps all positions and attends to the same window (local_window_size stays), so
    the results are equal. The caches' third axis is renamed as in layers without a window; weights stay where they are.
    """
    if not _windowed(model.graph):
        return model
    edited = deepcopy(model)
    graph = edited.graph
    for node in _windowed(graph):
        take_attribute(node, ATTRIBUTE, 0)
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


def with_total_of_all_rows(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` itself, in which the total length of GroupQueryAttention is no more that of the first row.

    mobius 0.1.0 sums up the mask's first row in a Gemma 4 for WebGPU; a step whose first row is not the longest then
    fails. It is now the width of the mask, as in all other exports.
    """
    made = {name: node for node in model.graph.node for name in node.output}
    totals = {node.input[6] for node in model.graph.node if node.op_type == "GroupQueryAttention"}
    for total in totals:
        node, first = made.get(total), None
        while node is not None and node.op_type in ("Gather", "Cast"):
            first = node if node.op_type == "Gather" else first
            node = made.get(node.input[0])
        if first is None or node is None or node.op_type != "ReduceSum":
            continue
        width, cast = f"{total}/olive_ext_width", f"{total}/olive_ext_total"
        first.input[0] = cast
        model.graph.node.insert(0, helper.make_node("Shape", [node.input[0]], [width], start=1, end=2))
        model.graph.node.insert(1, helper.make_node("Cast", [width], [cast], to=onnx.TensorProto.INT32))
    return model


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


def cross_graph(model: onnx.ModelProto, outputs: Iterable[str]) -> onnx.ModelProto:
    """A new model that returns only `outputs` of `model` and holds only the nodes and weights that they need.

    Where the decoder is one If over the input 'use_cache_branch', the graph without a past is taken.
    """
    graph = model.graph
    nodes = [inlined for node in graph.node for inlined in _without_past(node)]
    weights = [*graph.initializer, *(item for body in _bodies(graph.node) for item in body.initializer)]
    wanted = set(outputs)
    kept = nodes_behind(nodes, wanted)
    needed = wanted.union(reads(kept))
    returned = [output for output in graph.output if output.name in wanted]
    cut = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    cut.opset_import.extend(model.opset_import)
    cut.functions.extend(model.functions)
    cut.graph.name = graph.name
    cut.graph.node.extend(kept)
    cut.graph.output.extend(returned)
    cut.graph.input.extend(item for item in graph.input if item.name in needed)
    cut.graph.initializer.extend(item for item in weights if item.name in needed)
    return cut


def _bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs without a past, of those of `nodes` that choose by the past."""
    for node in nodes:
        if node.op_type == "If" and node.input[0] == _HAS_PAST:
            yield next(entry.g for entry in node.attribute if entry.name == "else_branch")


def _without_past(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The node itself, or the nodes of its graph without a past, whose outputs keep the names of the node's outputs."""
    body = next(_bodies([node]), None)
    if body is None:
        yield node
        return
    yield from body.node
    for inner, outer in zip(body.output, node.output, strict=True):
        if inner.name != outer:
            yield helper.make_node("Identity", [inner.name], [outer])
