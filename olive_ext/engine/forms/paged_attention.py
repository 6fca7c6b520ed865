"""Replaces GroupQueryAttention by PagedAttention: one step has the tokens of many sequences, each after its own past,
which lies in blocks that a table names.

Inside the graph the step is one row [1, N] of all new tokens; only the attention knows where a sequence begins. Inputs
of tokens and positions come packed, [N], and what served only the mask is removed. Weights stay where they are. Knows
no session, and of devices only which inputs and attributes their kernels take.

Axes: N tokens of all sequences of a step, D = heads x head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import onnx
from onnx import helper

from olive_ext.engine.runners.runner import NotFittingError
from olive_ext.engine.step import UNLIMITED
from olive_ext.graph.head_pattern import label
from olive_ext.graph.nodes import all_names, attribute, delete_at, reads, remove_dead
from olive_ext.model.types import KvTensor

TABLE, STARTS, PASTS, BOUNDS = (
    "block_table",
    "cumulative_sequence_lengths",
    "past_sequence_lengths",
    "attention_metadata",
)
"""The new inputs, by the names that onnxruntime-genai's builder gives them. `BOUNDS` lie in the host's memory: without
them each layer of CUDA's kernel waits for the host."""

INPUTS: Mapping[str, list[str | int | None]] = {TABLE: ["B", "blocks"], STARTS: ["B + 1"], PASTS: ["B"], BOUNDS: [3]}

KEPT = (
    *("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved"),
    *("qk_norm_epsilon", "k_quant_type", "v_quant_type"),
)
"""Attributes that mean the same to both operators. The default of each has no effect."""

_IGNORED = {"smooth_softmax": 0, "sliding_window_cache": 0, "causal": 1, "qk_output": 0, "kv_cache_bit_width": 0}
"""Attributes that PagedAttention lacks, and their values without effect. A bit width of 8 or 16 is the cache type's."""

_ROTARY, _POSITIONS, _BIAS, _SINK, _SCALES, _NORMS = (7, 8), 9, 10, 11, (12, 13), (14, 15)
"""Indices of GroupQueryAttention's inputs."""


@dataclass(frozen=True)
class PagedKernel:
    """The types, inputs and limits of a device's PagedAttention."""

    provider: str
    floats: Mapping[str, int]
    """Types of queries, and of caches that are not quantized: ONNX Runtime's names and ONNX's numbers."""

    quantized: frozenset[int] = frozenset()
    """Other types of caches."""

    has_bounds: bool = False
    """An input that bounds the lengths of the sequences."""

    has_softcap: bool = False
    has_norms: bool = False

    gathers_above: int | None = None
    """The largest head size with which the kernel reads keys and values in place. Those of larger heads are gathered
    for every step, once for each query head, padded to the longest row."""

    most_tokens: int = UNLIMITED
    """The most tokens in a step that the device is known to handle without a crash."""


KERNELS: Mapping[str, PagedKernel] = {
    "cuda": PagedKernel(
        "CUDA",
        {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16},
        frozenset({onnx.TensorProto.INT8, onnx.TensorProto.FLOAT8E4M3FN}),
        has_bounds=True,
        has_softcap=True,
        has_norms=True,
        gathers_above=256,
        most_tokens=1024,  # 2,048 near a full context are reported to end in illegal accesses (onnxruntime-genai, 2583)
    ),
    "webgpu": PagedKernel("WebGPU", {"float16": onnx.TensorProto.FLOAT16}, has_bounds=True),
}
"""By ONNX Runtime's name of the device (release 1.31.1, docs/OperatorKernels.md; WebGPU plugin 0.4.0)."""


Caches = Mapping[str, KvTensor]
"""The caches of a graph by their inputs."""


def gathered_bytes(model: onnx.ModelProto, caches: Caches, kernel: PagedKernel) -> int:
    """Bytes that a paged graph's attention gathers for each row and position, in the one layer that runs at a time."""
    if kernel.gathers_above is None:
        return 0
    gathered = (
        2 * 2 * int(attribute(node, "num_heads", 0)) * caches[node.input[3]].head_size  # keys and values in 16 bits
        for node in model.graph.node
        if node.op_type == "PagedAttention" and node.input[3] in caches
        if caches[node.input[3]].head_size > kernel.gathers_above
    )
    return max(gathered, default=0)


def with_paged_attention(
    model: onnx.ModelProto, caches: Caches, tokens: Sequence[str], masks: Sequence[str], kernel: PagedKernel
) -> onnx.ModelProto:
    """A copy of `model` in which every attention over `caches` is PagedAttention. `tokens`: inputs [B, S] of one number
    a token. `masks`: masks and lengths, which the attention no longer reads. Raises `NotFittingError`."""
    edited = deepcopy(model)
    graph = edited.graph
    if taken := {*INPUTS, _AXIS} & set(all_names(graph)):
        raise NotFittingError(f"the graph has a value named '{min(taken)}'")
    attentions = list(_attentions(graph, caches, kernel))
    paged = {node.output[0]: _paged_nodes(node, owner, kernel) for node, owner in attentions}
    lengths = {name for node, _ in attentions for name in node.input[5:7] if name}
    nodes = onnx.GraphProto()
    for node in graph.node:
        nodes.node.extend(paged.get(next(iter(node.output), ""), (node,)))
    del graph.node[:]
    graph.node.extend(nodes.node)
    graph.initializer.append(helper.make_tensor(_AXIS, onnx.TensorProto.INT64, [1], [0]))
    for length in lengths:
        remove_dead(graph, length)
    for name in masks:
        if reader := next((node for node in graph.node if name in reads([node])), None):
            raise NotFittingError(f"'{name}' is read by {label(reader)} besides the attention")
    _remove_inputs(graph, set(masks))
    pack_inputs(graph, tokens)
    sizes = dict(caches)  # of caches, old and new, which are declared as blocks
    for node in (node for node in graph.node if node.op_type == "PagedAttention"):
        sizes |= {present: sizes[past] for past, present in zip(node.input[3:5], node.output[1:3], strict=False)}
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name in sizes:
            _declare(value, ["blocks", "block_size", sizes[value.name].heads, sizes[value.name].head_size])
    for name, shape in INPUTS.items():
        if name != BOUNDS or kernel.has_bounds:
            graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT32, shape))
    return edited


def _paged_nodes(node: onnx.NodeProto, owner: onnx.NodeProto, kernel: PagedKernel) -> tuple[onnx.NodeProto, ...]:
    """The nodes that replace `node`, between its row [1, N, D] and the tokens [N, D].

    `owner` writes the cache that `node` reads: the node itself, or an earlier layer, whose keys and values are then
    given once more. Writing them again changes nothing.
    """
    name, is_owner = node.output[0], node is owner
    if not is_owner and not owner.input[1]:
        raise NotFittingError(f"{label(owner)} has keys and queries in one value, and another layer reads its cache")
    sources = [node.input[0], owner.input[1], owner.input[2]]
    flat = [f"{name}/olive_ext_{part}" if source else "" for part, source in zip("qkv", sources, strict=True)]
    cos, sin, sink, q_norm = (_input(node, place) for place in (*_ROTARY, _SINK, _NORMS[0]))
    k_norm, *scales = (_input(owner, place) for place in (_NORMS[1], *_SCALES))
    taken = [*flat, *owner.input[3:5], STARTS, PASTS, TABLE, cos, sin, "", sink, q_norm, k_norm, *scales]
    taken += [BOUNDS if kernel.has_bounds else ""]
    while not taken[-1]:
        taken.pop()
    made = [f"{name}/olive_ext_rows", *(node.output[1:3] if is_owner else ())]
    kept = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute if entry.name in KEPT}
    paged = helper.make_node("PagedAttention", taken, made, name=node.name, domain="com.microsoft", **kept)
    squeezed = [_reshaped("Squeeze", source, rows) for source, rows in zip(sources, flat, strict=True) if source]
    return (*squeezed, paged, _reshaped("Unsqueeze", made[0], name))


_AXIS = "olive_ext/first_axis"
"""The constant that Squeeze and Unsqueeze read."""


def _attentions(
    graph: onnx.GraphProto, caches: Caches, kernel: PagedKernel
) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """Each attention over a cache, with the attention that writes the cache."""
    owners: dict[str, onnx.NodeProto] = {}
    seen: set[str] = set()
    for node in graph.node:
        read = [name for name in node.input if name in caches]
        if node.op_type != "GroupQueryAttention":
            if read:
                raise NotFittingError(f"a cache is read by {label(node)}, which is not GroupQueryAttention")
            if any(name in owners for name in node.input):
                raise NotFittingError(f"{label(node)} reads all keys of a cache")
            continue
        owner = owners.get(node.input[3], node)
        if owner is node and read != list(node.input[3:5]):
            raise NotFittingError(f"{label(node)} reads no cache of its own")
        _check(node, kernel)
        owners |= {name: owner for name in (*node.input[3:5], *node.output[1:3]) if name}
        seen.update(read)
        yield node, owner
    if missing := caches.keys() - seen:
        raise NotFittingError(f"nothing reads the cache '{min(missing)}'")


def _check(node: onnx.NodeProto, kernel: PagedKernel) -> None:
    for entry in node.attribute:
        value = helper.get_attribute_value(entry)
        if entry.name == "kv_cache_bit_width" and value in (8, 16):
            continue
        if entry.name not in KEPT and value != _IGNORED.get(entry.name):
            raise NotFittingError(f"{label(node)} has {entry.name} {value}, which PagedAttention lacks")
    if b"PER_CHANNEL" in [attribute(node, f"{part}_quant_type", b"") for part in "kv"]:
        raise NotFittingError("the cache has a scale for each channel")
    if _input(node, _BIAS):
        raise NotFittingError("the attention has a bias")
    if _input(node, _NORMS[0]) and not kernel.has_norms:
        raise NotFittingError("the attention norms queries and keys, which this device's PagedAttention does not")
    if attribute(node, "softcap", 0.0) and not kernel.has_softcap:
        raise NotFittingError("the attention has a soft cap, which this device's PagedAttention lacks")


def pack_inputs(graph: onnx.GraphProto, names: Iterable[str]) -> None:
    """Makes the graph take the inputs `names`, [B, S], as [N], and treat them as one row, in place. Inputs that nothing
    reads are removed."""
    read = set(reads(graph.node))
    packed = [value for value in graph.input if value.name in set(names) and value.name in read]
    _remove_inputs(graph, set(names) - read)
    for value in packed:
        inner = f"{value.name}/olive_ext_row"
        for node in graph.node:
            node.input[:] = [inner if name == value.name else name for name in node.input]
        graph.initializer.append(helper.make_tensor(f"{inner}_shape", onnx.TensorProto.INT64, [2], [1, -1]))
        graph.node.insert(0, helper.make_node("Reshape", [value.name, f"{inner}_shape"], [inner], name=inner))
        _declare(value, ["N"])


def _declare(value: onnx.ValueInfoProto, shape: Sequence[int | str]) -> None:
    kind = value.type.tensor_type.elem_type
    value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shape))


def _remove_inputs(graph: onnx.GraphProto, names: set[str]) -> None:
    delete_at(graph.input, [index for index, value in enumerate(graph.input) if value.name in names])


def _input(node: onnx.NodeProto, place: int) -> str:
    return str(node.input[place]) if len(node.input) > place else ""


def _reshaped(operator: str, source: str, target: str) -> onnx.NodeProto:
    return helper.make_node(operator, [source, _AXIS], [target], name=target)
