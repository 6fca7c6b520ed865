"""Small graphs that run beside a decoder: copies of KV rows in memory that the host cannot address, and one attention.

Each is a serialized model. Knows no decoder and no session.

Axes: N slots, H heads, L positions, D head size, S tokens, P past.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from onnx import TensorProto, helper

from olive_ext.graph.nodes import NewGraph

INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")
OUTPUT = "attended"
"""Inputs and output of `attention_graph`. The other graphs of KV rows have `x<i>` and `y<i>` for each KV tensor."""

_INT64 = TensorProto.INT64

MOST_BYTES = 1024
"""The most bytes for which one index of a graph here stands. ScatterND on CUDA and WebGPU has one thread for each
index, which copies all that the index stands for (measured at `packed.kv.COPIED_BYTES`). Gather, GatherElements,
ScatterElements and Slice have one thread for each element. A CPU copies what an index stands for by one memcpy."""


def equal_parts(size: int, most: int) -> int:
    """The fewest equal parts of `size` that have at most `most` each."""
    return next(parts for parts in range(-(-size // most), size + 1) if size % parts == 0)


class RowTensor(NamedTuple):
    """Rows [N, *shape] of one tensor: slots, blocks, or rows of a batch. The axis that is None holds positions."""

    elem_type: int
    shape: tuple[int | None, ...]


def _parts_of(graph: NewGraph, index: str, parts: int) -> str:
    """The numbers [..., parts] of the parts of items that `index` [...] numbers, each of that many parts."""
    first = graph.add("Mul", [graph.add("Unsqueeze", [index, graph.integers([-1])]), graph.integers(parts)])
    return graph.add("Add", [first, graph.integers(range(parts))])


def _gathered(
    graph: NewGraph, value: str, tensor: RowTensor, rows: str, output: str = "", within: Sequence[str] = ()
) -> str:
    """Rows of `value` and, where it has positions, those of them that `within` names: by one Gather of equal parts of a
    position, none of more than `MOST_BYTES`."""
    axis = tensor.shape.index(None) if None in tensor.shape else -1
    *before, size = (prod(filter(None, sizes)) for sizes in (tensor.shape[: max(0, axis)], tensor.shape[axis + 1 :]))
    parts = equal_parts(size, MOST_BYTES // helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize)
    index = _parts_of(graph, rows, *before) if axis > 0 else rows
    if axis >= 0:
        first = graph.add("Mul", [graph.add("Unsqueeze", [index, graph.integers([-1])]), within[0]])
        index = graph.add("Add", [first, within[1]])
    if axis >= 0 or parts > 1:
        value = graph.add("Reshape", [value, graph.integers([-1, size // parts])])
    index = index if parts == 1 else _parts_of(graph, index, parts)
    is_shaped = parts == 1 and (axis < 0 or len(tensor.shape) == 2 + min(axis, 1))  # the index's axes and the last one
    taken = graph.add("Gather", [value, index], output if is_shaped else "", axis=0)
    shape = [0, *(-1 if size is None else size for size in tensor.shape)]
    return taken if is_shaped else graph.add("Reshape", [taken, graph.integers(shape)], output)


def stack_graph(tensors: Sequence[RowTensor], num_parts: int, *, is_whole: bool = False) -> bytes:
    """`y<i>` = rows of the tensors `x<i>_<part>` concatenated: of each part `rows_<part>`[K], and of these
    `positions_<part>`[L]. Whole parts are concatenated as they are. All tensors have equally many positions."""
    graph, within = NewGraph("stack"), dict[str, list[str]]()
    names = [f"_{part}" for part in range(num_parts)]
    for i, tensor in enumerate(tensors):
        output = graph.output(f"y{i}", tensor.elem_type, [None, *tensor.shape])
        values = []
        for part in names:
            values.append(graph.input(f"x{i}{part}", tensor.elem_type, [None, *tensor.shape]))
            if is_whole:
                continue
            if None in tensor.shape and part not in within:
                axis = 1 + tensor.shape.index(None)
                length = graph.add("Shape", [values[-1]], start=axis, end=axis + 1)
                within[part] = [length, graph.input(f"positions{part}", _INT64, [None])]
            made = output if num_parts == 1 else ""  # a Concat of one would copy it once more
            values[-1] = _gathered(graph, values[-1], tensor, f"rows{part}", made, within.get(part, ()))
        if values != [output]:
            graph.add("Concat", values, output, axis=0)
    for part in () if is_whole else names:
        graph.input(f"rows{part}", _INT64, [None])
    return graph.serialized()


def move_graph(tensors: Sequence[RowTensor]) -> bytes:
    """`y` [N,...] = `x` with the first `count`[1] positions of rows `target` [K,1,1,1] replaced by those of rows
    `source` [K,1,1,1] of `r` [M,...]; x, r and y may be one buffer. For values that can be bound by their own type and
    shape alone: ScatterND would need three numbers for each head of each position there, from the host."""
    graph = NewGraph("move")
    rows = [graph.input(name, TensorProto.INT32, ["K", 1, 1, 1]) for name in ("source", "target")]
    count = graph.input("count", _INT64, [1])
    for i, (elem_type, shape) in enumerate(tensors):
        x, r = (graph.input(f"{name}{i}", elem_type, [f"{name}{i}", *shape]) for name in "xr")
        axes = [count if size is None else graph.integers([size]) for size in (1, *shape)]
        source, target = (graph.add("Expand", [row, graph.add("Concat", axes, axis=0)]) for row in rows)
        taken = graph.add("GatherElements", [r, source], axis=0)
        graph.add("ScatterElements", [x, target, taken], graph.output(f"y{i}", elem_type, [f"x{i}", *shape]), axis=0)
    return graph.serialized()


def copy_positions_graph(tensors: Sequence[tuple[int, int]]) -> bytes:
    """`y` = `x` [N,W] with positions `target` [M] replaced by positions `source` [M]; x and y may be one buffer.
    `tensors`: the element type of each, and how many of its rows make a position. It is for values that can be bound by
    address, as rows of any width. The indices are computed on the device, once for all equal tensors."""
    graph = NewGraph("copy_positions")
    ends = [graph.input(name, _INT64, ["M"]) for name in ("source", "target")]
    for i, (elem_type, parts) in enumerate(tensors):
        x, y = graph.input(f"x{i}", elem_type, [f"N{i}", f"W{i}"]), graph.output(f"y{i}", elem_type, [f"N{i}", f"W{i}"])
        source, target = (_parts_of(graph, positions, parts) for positions in ends)
        taken = graph.add("Gather", [x, source], axis=0)
        graph.add("ScatterND", [x, graph.add("Unsqueeze", [target, graph.integers([-1])]), taken], y)
    return graph.serialized()


def copy_graph(elem_types: Sequence[int]) -> bytes:
    """`y` = `x` [N,H,L,D]."""
    graph = NewGraph("copy")
    for i, elem_type in enumerate(elem_types):
        axes = [f"{axis}{i}" for axis in "NHLD"]
        graph.add("Identity", [graph.input(f"x{i}", elem_type, axes)], graph.output(f"y{i}", elem_type, axes))
    return graph.serialized()


def zeros_graph() -> bytes:
    """`y` [N] = zero bytes, as many as `count` [1] says."""
    graph = NewGraph("zeros")
    zero = helper.make_tensor("zero", TensorProto.UINT8, [1], [0])
    count, zeros = graph.input("count", _INT64, [1]), graph.output("y", TensorProto.UINT8, ["N"])
    graph.add("ConstantOfShape", [count], zeros, value=zero)
    return graph.serialized()


FEATURES = "y"
"""The output of `pick_graph`, `put_rows_graph` and `fold_graph`."""


def pick_graph(elem_type: int, rank: int, size: int) -> bytes:
    """`y` [N,H] = the rows `rows` [N] of `x`, whose axes before the last of `rank` count rows of H = `size`. Providers
    that compile take an input without a rank for a scalar."""
    graph = NewGraph("pick")
    x = graph.input("x", elem_type, [*(f"R{axis}" for axis in range(rank - 1)), size])
    rows = x if rank == 2 else graph.add("Reshape", [x, graph.integers([-1, size])])
    return _picked(graph, rows, RowTensor(elem_type, (size,)))


def _picked(graph: NewGraph, value: str, rows: RowTensor) -> bytes:
    output = graph.output(FEATURES, rows.elem_type, ["N", *rows.shape])
    _gathered(graph, value, rows, graph.input("rows", _INT64, ["N"]), output)
    return graph.serialized()


def put_rows_graph(elem_type: int, size: int) -> bytes:
    """`y` [N,H] = the rows `rows` [N] of `a` [N,H] with `b` [P,H] after it, H = `size`."""
    graph = NewGraph("put")
    both = [graph.input(name, elem_type, [f"N{name}", size]) for name in "ab"]
    return _picked(graph, graph.add("Concat", both, axis=0), RowTensor(elem_type, (size,)))


def fold_graph(elem_type: int, rank: int) -> bytes:
    """`y` [B,S,...] = the first `count`[1] tokens of `x` [1,N,...], `rows`[2] of as many one after the other."""
    graph, axes = NewGraph("fold"), [f"A{axis}" for axis in range(2, rank)]
    x, rows = graph.input("x", elem_type, [1, "N", *axes]), graph.input("rows", _INT64, [2])
    first = graph.add("Slice", [x, graph.integers([0]), graph.input("count", _INT64, [1]), graph.integers([1])])
    shape = graph.add("Concat", [rows, graph.add("Shape", [x], start=2)], axis=0)
    graph.add("Reshape", [first, shape], graph.output(FEATURES, elem_type, ["B", "S", *axes]))
    return graph.serialized()


CANDIDATE_OUTPUTS = ("logprobs", "ids")
"""The outputs of `candidates_graph`."""


def candidates_graph(vocab_size: int) -> bytes:
    """The most probable tokens of some rows: what a beam search reads of a step. Inputs `logits` float32[K, V], which
    are log-probabilities in nats, `first` and `stop` int64[1], between which the rows lie, `count` int64[1], which is C
    and at most V. Outputs `logprobs` float32[N, C] and `ids` int64[N, C], best first."""
    graph = NewGraph("candidates")
    logits = graph.input("logits", TensorProto.FLOAT, ["K", vocab_size])
    bounds = [graph.input(name, _INT64, [1]) for name in ("first", "stop")]
    picked = graph.add("Slice", [logits, *bounds, graph.integers([0])])
    kinds = zip(CANDIDATE_OUTPUTS, (TensorProto.FLOAT, _INT64), strict=True)
    outputs = [graph.output(name, kind, ["N", "C"]) for name, kind in kinds]
    graph.add_named("TopK", [picked, graph.input("count", _INT64, [1])], outputs)
    return graph.serialized()


def attention_graph(elem_type: int, num_heads: int, head_size: int) -> bytes:
    """GroupQueryAttention over `query`, `key`, `value` [1, S, H*D] after a past [1, H, P, D], to `attended` of the
    shape of `query`. `seqlens_k` int32[1] is the total length less one."""
    graph = NewGraph("attention")
    tokens: list[str | int] = [1, "S", num_heads * head_size]
    for i, name in enumerate(INPUTS[:5]):
        graph.input(name, elem_type, tokens if i < 3 else [1, num_heads, "P", head_size])
    for name, shape in zip(INPUTS[5:], ([1], []), strict=True):
        graph.input(name, TensorProto.INT32, shape)
    present: list[str | int] = [1, num_heads, "T", head_size]
    outputs = [graph.output(OUTPUT, elem_type, tokens)]
    outputs += [graph.output(name, elem_type, present) for name in ("present_key", "present_value")]
    heads = {"num_heads": num_heads, "kv_num_heads": num_heads}
    graph.add_named("GroupQueryAttention", INPUTS, outputs, domain="com.microsoft", **heads)
    return graph.serialized("com.microsoft")
