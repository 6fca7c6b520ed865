"""Small graphs that run beside a decoder: moves of KV rows in memory that the host cannot address, and one attention.

Each is a serialized model of opset 18. Knows no decoder and no session.

Axes: N slots, H heads, L positions, D head size, S tokens, P past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from onnx import GraphProto, NodeProto, TensorProto, helper

from olive_ext.graph.nodes import model_of

INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")
OUTPUT = "attended"
"""Inputs and output of `attention_graph`. The other graphs of KV rows have `x<i>` and `y<i>` for each KV tensor."""

_value = helper.make_tensor_value_info


class StackedTensor(NamedTuple):
    """A tensor of `stack_graph`, and the axis of its positions; None where it has none."""

    elem_type: int
    rank: int
    position_axis: int | None


def stack_graph(tensors: Sequence[StackedTensor], num_parts: int, *, is_whole: bool = False) -> bytes:
    """`y<i>` = rows of the tensors `x<i>_<part>` behind each other: of each part `rows_<part>`[K], and of these
    `positions_<part>`[L]; all of them as they are where the parts are whole."""
    inputs, outputs, nodes, indices = [], [], [], set()
    for i, (elem_type, rank, position_axis) in enumerate(tensors):
        parts = []
        for part in range(num_parts):
            value = f"x{i}_{part}"
            inputs.append(_value(value, elem_type, [None] * rank))
            for name, axis in (("rows", 0), ("positions", position_axis)):
                if axis is not None and not is_whole:
                    index, taken = f"{name}_{part}", f"{value}_{name}"
                    nodes.append(helper.make_node("Gather", [value, index], [taken], axis=axis))
                    indices.add(index)
                    value = taken
            parts.append(value)
        nodes.append(helper.make_node("Concat", parts, [f"y{i}"], axis=0))
        outputs.append(_value(f"y{i}", elem_type, [None] * rank))
    inputs += [_value(index, TensorProto.INT64, [None]) for index in sorted(indices)]
    return _serialized(helper.make_graph(nodes, "stack", inputs, outputs))


def take_row_graph(elem_types: Sequence[int]) -> bytes:
    """`y` [1,H,L,D] = row `row`[1] of `x` [N,H,L,D]."""
    nodes = [helper.make_node("Gather", [f"x{i}", "row"], [f"y{i}"], axis=0) for i in range(len(elem_types))]
    return _rows_graph(nodes, elem_types, ["x"], ("row", [1]))


def put_row_graph(elem_types: Sequence[int]) -> bytes:
    """`y` [N,H,L,D] = `x` with row `row`[1,1] replaced by `r` [1,H,L,D]; x and y may be one buffer."""
    nodes = [helper.make_node("ScatterND", [f"x{i}", "row", f"r{i}"], [f"y{i}"]) for i in range(len(elem_types))]
    return _rows_graph(nodes, elem_types, ["x", "r"], ("row", [1, 1]))


def fork_graph(elem_types: Sequence[int]) -> bytes:
    """`y` = `x` [N,...] with rows `target`[K,1] replaced by rows `source`[K]; x and y may be one buffer."""
    nodes = []
    for i in range(len(elem_types)):
        nodes.append(helper.make_node("Gather", [f"x{i}", "source"], [f"r{i}"], axis=0))
        nodes.append(helper.make_node("ScatterND", [f"x{i}", "target", f"r{i}"], [f"y{i}"]))
    return _rows_graph(nodes, elem_types, ["x"], ("source", ["K"]), ("target", ["K", 1]))


def copy_graph(elem_types: Sequence[int]) -> bytes:
    """`y` = `x`."""
    nodes = [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in range(len(elem_types))]
    return _rows_graph(nodes, elem_types, ["x"])


def zeros_graph() -> bytes:
    """`y` [N] = zero bytes, as many as `count` [1] says."""
    zero = helper.make_tensor("zero", TensorProto.UINT8, [1], [0])
    node = helper.make_node("ConstantOfShape", ["count"], ["y"], value=zero)
    inputs, outputs = [_value("count", TensorProto.INT64, [1])], [_value("y", TensorProto.UINT8, ["N"])]
    return _serialized(helper.make_graph([node], "zeros", inputs, outputs))


FEATURES = "y"
"""The output of `pick_graph`, `join_graph`, `put_rows_graph` and `fold_graph`."""


def pick_graph(elem_type: int, rank: int) -> bytes:
    """`y` [N,H] = the rows `rows` [N] of `x`, whose axes before the last of `rank` count rows. Providers that compile
    take an input without a rank for a scalar."""
    shape = helper.make_tensor("all_rows", TensorProto.INT64, [1], [-1])
    nodes = [
        helper.make_node("Shape", ["x"], ["width"], start=-1),
        helper.make_node("Concat", ["all_rows", "width"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["flat"]),
        helper.make_node("Gather", ["flat", "rows"], [FEATURES], axis=0),
    ]
    axes: list[str | int | None] = [*(f"R{axis}" for axis in range(rank - 1)), "H"]
    inputs = [_value("x", elem_type, axes), _value("rows", TensorProto.INT64, ["N"])]
    outputs = [_value(FEATURES, elem_type, ["N", "H"])]
    return _serialized(helper.make_graph(nodes, "pick", inputs, outputs, [shape]))


def join_graph(elem_type: int) -> bytes:
    """`y` = the rows of `a` [N,H], then those of `b`."""
    inputs = [_value(name, elem_type, [f"N{name}", "H"]) for name in "ab"]
    nodes = [helper.make_node("Concat", ["a", "b"], [FEATURES], axis=0)]
    return _serialized(helper.make_graph(nodes, "join", inputs, [_value(FEATURES, elem_type, ["N", "H"])]))


def put_rows_graph(elem_type: int) -> bytes:
    """`y` [N,H] = the rows `rows` [N] of `a` [N,H] with `b` [P,H] behind it."""
    inputs = [_value(name, elem_type, [f"N{name}", "H"]) for name in "ab"]
    inputs.append(_value("rows", TensorProto.INT64, ["N"]))
    nodes = [
        helper.make_node("Concat", ["a", "b"], ["both"], axis=0),
        helper.make_node("Gather", ["both", "rows"], [FEATURES], axis=0),
    ]
    return _serialized(helper.make_graph(nodes, "put", inputs, [_value(FEATURES, elem_type, ["N", "H"])]))


def fold_graph(elem_type: int, rank: int) -> bytes:
    """`y` [B,S,...] = the first `count`[1] tokens of `x` [1,N,...], `rows`[2] of as many one behind the other."""
    nodes = [
        helper.make_node("Slice", ["x", "begin", "count", "axis"], ["first"]),
        helper.make_node("Shape", ["x"], ["rest"], start=2),
        helper.make_node("Concat", ["rows", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["first", "shape"], [FEATURES]),
    ]
    axes = [f"A{axis}" for axis in range(2, rank)]
    inputs = [_value("x", elem_type, [1, "N", *axes])]
    inputs += [_value(name, TensorProto.INT64, [size]) for name, size in (("rows", 2), ("count", 1))]
    constants = [helper.make_tensor(name, TensorProto.INT64, [1], [n]) for name, n in (("begin", 0), ("axis", 1))]
    outputs = [_value(FEATURES, elem_type, ["B", "S", *axes])]
    return _serialized(helper.make_graph(nodes, "fold", inputs, outputs, constants))


CANDIDATE_OUTPUTS = ("logprobs", "ids")
"""The outputs of `candidates_graph`."""


def candidates_graph(vocab_size: int | None) -> bytes:
    """The most probable tokens of some rows: what a beam search reads of a step. Inputs `logits` float32[K, V], which
    are log-probabilities in nats, `rows` int64[N] of K, `count` int64[1], which is C and at most V. Outputs `logprobs`
    float32[N, C] and `ids` int64[N, C], best first."""
    sizes: list[str | int | None] = ["K", "V" if vocab_size is None else vocab_size]
    inputs = [_value("logits", TensorProto.FLOAT, sizes)]
    inputs += [_value(name, TensorProto.INT64, [size]) for name, size in (("rows", "N"), ("count", 1))]
    nodes = [
        helper.make_node("Gather", ["logits", "rows"], ["picked"], axis=0),
        helper.make_node("TopK", ["picked", "count"], CANDIDATE_OUTPUTS),
    ]
    kinds = zip(CANDIDATE_OUTPUTS, (TensorProto.FLOAT, TensorProto.INT64), strict=True)
    outputs = [_value(name, kind, ["N", "C"]) for name, kind in kinds]
    return _serialized(helper.make_graph(nodes, "candidates", inputs, outputs))


def attention_graph(elem_type: int, num_heads: int, head_size: int) -> bytes:
    """GroupQueryAttention over `query`, `key`, `value` [1, S, H*D] behind a past [1, H, P, D], to `attended` of the
    shape of `query`. `seqlens_k` int32[1] is the total length less one."""
    tokens: list[str | int | None] = [1, "S", num_heads * head_size]
    past: list[str | int | None] = [1, num_heads, "P", head_size]
    inputs = [_value(name, elem_type, tokens if i < 3 else past) for i, name in enumerate(INPUTS[:5])]
    inputs += [_value("seqlens_k", TensorProto.INT32, [1]), _value("total_sequence_length", TensorProto.INT32, [])]
    outputs = [_value(OUTPUT, elem_type, tokens)]
    outputs += [_value(name, elem_type, [1, num_heads, "T", head_size]) for name in ("present_key", "present_value")]
    heads: dict[str, Any] = {"num_heads": num_heads, "kv_num_heads": num_heads}
    names = [output.name for output in outputs]
    node = helper.make_node("GroupQueryAttention", INPUTS, names, domain="com.microsoft", **heads)
    return _serialized(helper.make_graph([node], "attention", inputs, outputs), "com.microsoft")


def _rows_graph(
    nodes: list[NodeProto], elem_types: Sequence[int], tensors: Sequence[str], *indices: tuple[str, list[int | str]]
) -> bytes:
    inputs = [
        _value(f"{name}{i}", kind, [f"{name}{i}_{axis}" for axis in "NHLD"])
        for name in tensors
        for i, kind in enumerate(elem_types)
    ]
    inputs += [_value(name, TensorProto.INT64, shape) for name, shape in indices]
    outputs = [_value(f"y{i}", kind, [f"y{i}_{axis}" for axis in "NHLD"]) for i, kind in enumerate(elem_types)]
    return _serialized(helper.make_graph(nodes, "rows", inputs, outputs))


def _serialized(graph: GraphProto, *domains: str) -> bytes:
    return bytes(model_of(graph, 18, *domains).SerializeToString())
