"""Small graphs that run beside a decoder: moves of KV rows in memory that the host cannot address, and one attention.

Each is a serialized model. Knows no decoder and no session.

Axes: N slots, H heads, L positions, D head size, S tokens, P past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnx import TensorProto, helper

from olive_ext.graph.nodes import NewGraph

INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")
OUTPUT = "attended"
"""Inputs and output of `attention_graph`. The other graphs of KV rows have `x<i>` and `y<i>` for each KV tensor."""

_INT64 = TensorProto.INT64


class StackedTensor(NamedTuple):
    """A tensor of `stack_graph`, and the axis of its positions; None where it has none."""

    elem_type: int
    rank: int
    position_axis: int | None


def stack_graph(tensors: Sequence[StackedTensor], num_parts: int, *, is_whole: bool = False) -> bytes:
    """`y<i>` = rows of the tensors `x<i>_<part>` behind each other: of each part `rows_<part>`[K], and of these
    `positions_<part>`[L]; all of them as they are where the parts are whole."""
    graph, indices = NewGraph("stack"), set()
    for i, (elem_type, rank, position_axis) in enumerate(tensors):
        parts = []
        for part in range(num_parts):
            value = graph.input(f"x{i}_{part}", elem_type, [None] * rank)
            for name, axis in (("rows", 0), ("positions", position_axis)):
                if axis is not None and not is_whole:
                    value = graph.add("Gather", [value, f"{name}_{part}"], axis=axis)
                    indices.add(f"{name}_{part}")
            parts.append(value)
        graph.add("Concat", parts, graph.output(f"y{i}", elem_type, [None] * rank), axis=0)
    for index in sorted(indices):
        graph.input(index, _INT64, [None])
    return graph.serialized()


def take_row_graph(elem_types: Sequence[int]) -> bytes:
    """`y` [1,H,L,D] = row `row`[1] of `x` [N,H,L,D]."""
    graph = _of_rows(elem_types, "x", row=[1])
    for i in range(len(elem_types)):
        graph.add("Gather", [f"x{i}", "row"], f"y{i}", axis=0)
    return graph.serialized()


def put_row_graph(elem_types: Sequence[int]) -> bytes:
    """`y` [N,H,L,D] = `x` with row `row`[1,1] replaced by `r` [1,H,L,D]; x and y may be one buffer."""
    graph = _of_rows(elem_types, "xr", row=[1, 1])
    for i in range(len(elem_types)):
        graph.add("ScatterND", [f"x{i}", "row", f"r{i}"], f"y{i}")
    return graph.serialized()


def fork_graph(elem_types: Sequence[int]) -> bytes:
    """`y` = `x` [N,...] with rows `target`[K,1] replaced by rows `source`[K]; x and y may be one buffer."""
    graph = _of_rows(elem_types, "x", source=["K"], target=["K", 1])
    for i in range(len(elem_types)):
        taken = graph.add("Gather", [f"x{i}", "source"], axis=0)
        graph.add("ScatterND", [f"x{i}", "target", taken], f"y{i}")
    return graph.serialized()


def copy_graph(elem_types: Sequence[int]) -> bytes:
    """`y` = `x`."""
    graph = _of_rows(elem_types, "x")
    for i in range(len(elem_types)):
        graph.add("Identity", [f"x{i}"], f"y{i}")
    return graph.serialized()


def zeros_graph() -> bytes:
    """`y` [N] = zero bytes, as many as `count` [1] says."""
    graph = NewGraph("zeros")
    zero = helper.make_tensor("zero", TensorProto.UINT8, [1], [0])
    count, zeros = graph.input("count", _INT64, [1]), graph.output("y", TensorProto.UINT8, ["N"])
    graph.add("ConstantOfShape", [count], zeros, value=zero)
    return graph.serialized()


FEATURES = "y"
"""The output of `pick_graph`, `join_graph`, `put_rows_graph` and `fold_graph`."""


def pick_graph(elem_type: int, rank: int) -> bytes:
    """`y` [N,H] = the rows `rows` [N] of `x`, whose axes before the last of `rank` count rows. Providers that compile
    take an input without a rank for a scalar."""
    graph = NewGraph("pick")
    x = graph.input("x", elem_type, [*(f"R{axis}" for axis in range(rank - 1)), "H"])
    shape = graph.add("Concat", [graph.integers([-1]), graph.add("Shape", [x], start=-1)], axis=0)
    picked = [graph.add("Reshape", [x, shape]), graph.input("rows", _INT64, ["N"])]
    graph.add("Gather", picked, graph.output(FEATURES, elem_type, ["N", "H"]), axis=0)
    return graph.serialized()


def join_graph(elem_type: int) -> bytes:
    """`y` = the rows of `a` [N,H], then those of `b`."""
    graph = NewGraph("join")
    both = [graph.input(name, elem_type, [f"N{name}", "H"]) for name in "ab"]
    graph.add("Concat", both, graph.output(FEATURES, elem_type, ["N", "H"]), axis=0)
    return graph.serialized()


def put_rows_graph(elem_type: int) -> bytes:
    """`y` [N,H] = the rows `rows` [N] of `a` [N,H] with `b` [P,H] behind it."""
    graph = NewGraph("put")
    both = graph.add("Concat", [graph.input(name, elem_type, [f"N{name}", "H"]) for name in "ab"], axis=0)
    rows = graph.input("rows", _INT64, ["N"])
    graph.add("Gather", [both, rows], graph.output(FEATURES, elem_type, ["N", "H"]), axis=0)
    return graph.serialized()


def fold_graph(elem_type: int, rank: int) -> bytes:
    """`y` [B,S,...] = the first `count`[1] tokens of `x` [1,N,...], `rows`[2] of as many one behind the other."""
    graph, axes = NewGraph("fold"), [f"A{axis}" for axis in range(2, rank)]
    x, rows = graph.input("x", elem_type, [1, "N", *axes]), graph.input("rows", _INT64, [2])
    first = graph.add("Slice", [x, graph.integers([0]), graph.input("count", _INT64, [1]), graph.integers([1])])
    shape = graph.add("Concat", [rows, graph.add("Shape", [x], start=2)], axis=0)
    graph.add("Reshape", [first, shape], graph.output(FEATURES, elem_type, ["B", "S", *axes]))
    return graph.serialized()


CANDIDATE_OUTPUTS = ("logprobs", "ids")
"""The outputs of `candidates_graph`."""


def candidates_graph(vocab_size: int | None) -> bytes:
    """The most probable tokens of some rows: what a beam search reads of a step. Inputs `logits` float32[K, V], which
    are log-probabilities in nats, `rows` int64[N] of K, `count` int64[1], which is C and at most V. Outputs `logprobs`
    float32[N, C] and `ids` int64[N, C], best first."""
    graph = NewGraph("candidates")
    logits = graph.input("logits", TensorProto.FLOAT, ["K", "V" if vocab_size is None else vocab_size])
    picked = graph.add("Gather", [logits, graph.input("rows", _INT64, ["N"])], axis=0)
    kinds = zip(CANDIDATE_OUTPUTS, (TensorProto.FLOAT, _INT64), strict=True)
    outputs = [graph.output(name, kind, ["N", "C"]) for name, kind in kinds]
    graph.add_named("TopK", [picked, graph.input("count", _INT64, [1])], outputs)
    return graph.serialized()


def attention_graph(elem_type: int, num_heads: int, head_size: int) -> bytes:
    """GroupQueryAttention over `query`, `key`, `value` [1, S, H*D] behind a past [1, H, P, D], to `attended` of the
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


def _of_rows(elem_types: Sequence[int], tensors: str, **indices: list[int | str]) -> NewGraph:
    """A graph of KV rows without nodes: of each KV tensor an input for each letter of `tensors`, and an output."""
    graph = NewGraph("rows")
    for name in tensors:
        for i, kind in enumerate(elem_types):
            graph.input(f"{name}{i}", kind, [f"{name}{i}_{axis}" for axis in "NHLD"])
    for name, shape in indices.items():
        graph.input(name, _INT64, shape)
    for i, kind in enumerate(elem_types):
        graph.output(f"y{i}", kind, [f"y{i}_{axis}" for axis in "NHLD"])
    return graph
