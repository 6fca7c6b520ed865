"""Changes to graphs as exported: full-length KV caches, a bias where a kernel needs one, the part of a decoder that
computes the cross-attention KV as a model of its own, and what some providers or few shapes need. Knows no session and
no provider.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from olive_ext.errors import ModelError
from olive_ext.graph.nodes import (
    NodeWriter,
    all_names,
    attribute,
    constants_of,
    default_opset,
    delete_at,
    makers_of,
    reads,
    remove_dead,
    subgraphs,
    take_attribute,
)

ATTRIBUTE = "sliding_window_cache"
PAST_LENGTH = "past_sequence_length"
TOTAL_LENGTH = "total_sequence_length"
"""The names that exporters give to the lengths of full caches."""

_HAS_PAST = "use_cache_branch"
"""The input by which a merged decoder chooses between its two graphs."""


def with_full_length_kv(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` in which every GroupQueryAttention keeps all positions, so that slots can be rewound, batched
    and shared; `model` itself where all attentions do so already.

    A layer with sliding_window_cache=1 keeps its last positions only and drops the others as it goes. Without the
    attribute the same layer keeps all positions and attends to the same window (local_window_size stays), so
    the results are equal. The caches' third axis is renamed as in layers without a window; weights stay where they are.
    """
    attentions = [index for index, node in enumerate(model.graph.node) if node.op_type == "GroupQueryAttention"]
    windowed = [index for index in attentions if attribute(model.graph.node[index], ATTRIBUTE, 0)]
    if not windowed:
        return model
    edited = deepcopy(model)
    graph = edited.graph
    for node in (graph.node[index] for index in windowed):
        take_attribute(node, ATTRIBUTE, 0)
        _rename_length(graph.input, node.input[3:5], PAST_LENGTH)
        _rename_length((*graph.output, *graph.value_info), node.output[1:3], TOTAL_LENGTH)
    return edited


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
        bias.raw_data = bytes(math.prod(bias.dims) * helper.tensor_dtype_to_np_dtype(weight.data_type).itemsize)
        graph.initializer.append(bias)
        node.input[:] = [*node.input[:2], bias.name, *node.input[3:]]
    return model


def cross_graph(model: onnx.ModelProto, outputs: Iterable[str]) -> onnx.ModelProto:
    """A new model that returns only `outputs` of `model` and holds only the nodes and weights that they need.

    Where the decoder is one If over the input 'use_cache_branch', the graph without a past is taken.
    """
    graph = model.graph
    nodes, weights = list[onnx.NodeProto](), list(graph.initializer)
    for node in graph.node:
        if node.op_type != "If" or node.input[0] != _HAS_PAST:
            nodes.append(node)
            continue
        body = attribute(node, "else_branch", None)
        weights += body.initializer
        renamed = [(inner.name, outer) for inner, outer in zip(body.output, node.output, strict=True)]
        nodes += body.node
        nodes += (helper.make_node("Identity", [inner], [outer]) for inner, outer in renamed if inner != outer)
    wanted = set(outputs)
    kept = makers_of(nodes, wanted)
    needed = wanted.union(reads(kept))
    cut = part_of(model, kept, [output for output in graph.output if output.name in wanted], weights)
    cut.graph.input.extend(item for item in graph.input if item.name in needed)
    return cut


def part_of(
    model: onnx.ModelProto,
    nodes: Iterable[onnx.NodeProto],
    outputs: Iterable[onnx.ValueInfoProto],
    weights: Iterable[onnx.TensorProto] | None = None,
) -> onnx.ModelProto:
    """A new model of some `nodes` of `model` with these `outputs` and the weights that are read, of `weights` or of the
    graph's; it has no inputs yet."""
    whole, part = model.graph, onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = whole.name or "part"
    part.graph.node.extend(nodes)
    part.graph.output.extend(outputs)
    read = {*reads(part.graph.node), *(output.name for output in part.graph.output)}
    weights = whole.initializer if weights is None else weights
    part.graph.initializer.extend(tensor for tensor in weights if tensor.name in read)
    part.graph.sparse_initializer.extend(one for one in whole.sparse_initializer if one.values.name in read)
    return part


NUM_ROWS = "num_real_rows"
"""The output that has the number of rows that are not of padding, [1]."""


def drop_shape_hints(graph: onnx.GraphProto) -> None:
    """Removes in place the shapes that the exporter noted for intermediate values, where a length in one is symbolic.

    A noted shape may be wrong (onnxruntime-genai's repeated keys have the length of the new tokens there, not of all
    tokens). ONNX Runtime then puts values that seem equally large in one buffer, and fails. It infers what it needs.
    """
    hints = ((index, value.type.tensor_type.shape.dim) for index, value in enumerate(graph.value_info))
    delete_at(graph.value_info, {index for index, dims in hints if any(dim.dim_param for dim in dims)})


def clips_as_max(graph: onnx.GraphProto) -> None:
    """Puts Max in place of each Clip of integers without an upper end, which is the same. OpenVINO 2025.4 returns 0
    from such a Clip, with which embedding graphs count placeholders."""
    lower = {name: tensor.data_type for name, tensor in constants_of(graph).items()}
    for node in graph.node:
        is_open = node.op_type == "Clip" and len(node.input) > 1 and not any(node.input[2:])
        if is_open and lower.get(node.input[1]) in (onnx.TensorProto.INT32, onnx.TensorProto.INT64):
            node.op_type = "Max"
            del node.input[2:]


def pad_rows(model: ModelProto, places: str, outputs: Sequence[str]) -> None:
    """Makes an encoder's `outputs` [rows, size] to [1, places, size], with zeros after the rows, and adds the output
    `NUM_ROWS`. There are as many places as the first two axes of the input `places` have."""
    graph = model.graph
    writer = NodeWriter(graph, default_opset(model), "padded_rows")
    first, second = writer.integers([0]), writer.integers([1])
    sizes = writer.add("Slice", [writer.add("Shape", [places]), first, writer.integers([2])])
    most = writer.add("ReduceProd", [sizes], keepdims=1)
    for name in outputs:
        renamed = f"{name}_of_rows"
        for node in graph.node:
            node.input[:] = [renamed if taken == name else taken for taken in node.input]
            node.output[:] = [renamed if made == name else made for made in node.output]
        rows = writer.add("Slice", [writer.add("Shape", [renamed]), first, second])
        more = writer.add("Max", [writer.add("Sub", [most, rows]), first])
        ends = writer.add("Concat", [first, first, more, first], axis=0)
        writer.add("Unsqueeze", [writer.add("Pad", [renamed, ends]), first], name)
        if name == outputs[0]:
            writer.add("Identity", [rows], NUM_ROWS)
    for value in graph.output:
        if value.name in outputs:
            kind = value.type.tensor_type
            shape: list[int | str | None] = [1, "places", kind.shape.dim[-1].dim_value]
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind.elem_type, shape))
    graph.output.append(helper.make_tensor_value_info(NUM_ROWS, TensorProto.INT64, [1]))


def constants_as_inputs(graph: GraphProto, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Makes the constants named in `arrays`, which have their types and shapes, inputs of the graph, in place."""
    delete_at(graph.initializer, {i for i, tensor in enumerate(graph.initializer) if tensor.name in arrays})
    for node in graph.node:
        for index, name in enumerate(node.output):
            if name in arrays:
                node.output[index] = f"{name}_constant"
    for name, array in arrays.items():
        remove_dead(graph, f"{name}_constant")
        elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        graph.input.append(helper.make_tensor_value_info(name, elem_type, array.shape))


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
    returned: list[list[TensorProto | None]] = []
    for body in subgraphs(node):
        constants = constants_of(body).items()
        known = {name: one for name, one in constants if len(one.dims) == 2 and not one.external_data}
        returned.append([known.get(output.name) for output in body.output])
    for tables in zip(*returned, strict=True):
        most = max([table.dims[0] for table in tables if table is not None], default=0)
        for table in tables:
            if table is not None and 0 < table.dims[0] < most:
                rows = numpy_helper.to_array(table)
                longer = np.pad(rows, ((0, most - len(rows)), (0, 0)), "edge")
                table.CopyFrom(numpy_helper.from_array(longer, table.name))
