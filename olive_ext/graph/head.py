"""Puts the scoring head into a decoder: rows in, log-probabilities and greedy tokens out, no logits.

Pure functions from model to model; weights stay where they are. Knows no session and no provider.

Axes: B batch, S positions, H hidden size, V vocabulary, R rows that are scored, T targets, K rows handed out whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import onnx
from onnx import helper

from olive_ext.errors import ModelError
from olive_ext.graph.edit import NodeWriter, default_opset, remove_dead
from olive_ext.graph.pattern import LAYOUT, Head, NotUnderstood, find_head
from olive_ext.graph.sums import sum_of_rows

_FLOAT = onnx.TensorProto.FLOAT
_INT64 = onnx.TensorProto.INT64
_PREFIX = "olive_ext/scoring"

NEXT_IDS = "next_ids"


@dataclass(frozen=True)
class TokenForm:
    """How a decoder takes token ids: their ONNX element type, and 2 axes [B, S] or 1 [N]."""

    elem_type: int
    rank: int


@dataclass(frozen=True)
class ScoringGraph:
    """A decoder whose logits output is replaced.

    Inputs added, all int64: `score_rows`[R] (indices into the flattened B*S), `target_rows`[T] and `sample_rows`[K]
    (indices into R), `target_ids`[T]. Outputs: `target_logprobs` float32[T], `greedy_ids` int64[R], `sample_logits`
    float32[K, V]. R, T and K may be 0. Where asked for, also `next_ids`, the greedy tokens as the decoder takes one
    token of each row ([R, 1] or [R]), and `score_logits` float32[R, V], both for use on the device; where R is 0 they
    have one row, which means nothing.
    """

    model: onnx.ModelProto
    kind: Literal["hidden", "logits"]
    """Rows are picked from the hidden states, before the product with the vocabulary, or from the logits."""

    reason: str
    """One sentence for `olive-ext check`: what was recognised, or why not."""

    vocab_size: int | None
    """None where neither the logits nor the weight state it."""


def add_scoring_head(
    model: onnx.ModelProto, logits_name: str, *, exposes_rows: bool = False, tokens: TokenForm | None = None
) -> ScoringGraph:
    """A copy of `model` with the head in place of the output `logits_name` [B, S, V]; the rest works as before.

    With `exposes_rows` it has the output `score_logits`, with `tokens` the output `next_ids` in that form.
    Raises ModelError when the output is missing, is pruned, or a name of the head is taken.
    """
    check_scoring(model, logits_name)
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    graph = edited.graph
    logits = _output(edited, logits_name)
    elem_type = logits.type.tensor_type.elem_type
    vocab_size = _static_dim(logits, -1)
    writer = NodeWriter(graph, default_opset(edited), _PREFIX)
    try:
        head = find_head(graph, logits_name, vocab_size)
    except NotUnderstood as error:
        value = _pick_rows(writer, logits_name, vocab_size, is_flat=True)
        kind, reason = "logits", f"rows are picked from the logits: {error}"
    else:
        vocab_size = head.vocab_size
        value = _head_of_rows(writer, head)
        kind, reason = "hidden", f"rows are picked before {head.product}, which computes the logits"
    del graph.output[[output.name for output in graph.output].index(logits_name)]
    _score(writer, value, elem_type, vocab_size, exposes_rows, tokens)
    remove_dead(graph, logits_name)
    return ScoringGraph(edited, kind, reason, vocab_size)  # type: ignore[arg-type]


def scoring_graph(
    elem_type: int,
    vocab_size: int | None = None,
    rank: int = 3,
    *,
    exposes_rows: bool = False,
    tokens: TokenForm | None = None,
) -> onnx.ModelProto:
    """The head as a model of its own, over an input `logits` of an ONNX element type: [B, S, V], or [N, V] where the
    `rank` is 2."""
    graph = onnx.GraphProto(name="scoring")
    writer = NodeWriter(graph, 21, _PREFIX)
    writer.input("logits", elem_type, [*("B", "S")[3 - rank :], "V" if vocab_size is None else vocab_size])
    value = _pick_rows(writer, "logits", vocab_size, is_flat=True)
    _score(writer, value, elem_type, vocab_size, exposes_rows, tokens)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def check_scoring(model: onnx.ModelProto, logits_name: str) -> None:
    """Raises ModelError unless the output holds logits of every position."""
    logits = _output(model, logits_name)
    rank = len(logits.type.tensor_type.shape.dim) if logits.type.tensor_type.HasField("shape") else 3
    if rank not in (2, 3):
        raise ModelError(
            f"output '{logits_name}' has rank {rank}; scoring needs [batch, positions, vocabulary] or "
            "[tokens, vocabulary]"
        )
    if (rank == 3 and _static_dim(logits, 1) == 1) or _is_cut_to_last(model.graph, logits_name):
        raise ModelError(
            f"output '{logits_name}' holds the logits of the last position only (a pruned LM head), which cannot "
            "score a text; export the model without pruning its logits"
        )


def _score(
    writer: NodeWriter,
    value: str,
    elem_type: int,
    vocab_size: int | None,
    exposes_rows: bool,
    tokens: TokenForm | None,
) -> None:
    """From `value`, logits [.., R, V] of `elem_type`, to the outputs."""
    for name, axis in (("target_rows", "T"), ("target_ids", "T"), ("sample_rows", "K")):
        writer.input(name, _INT64, [axis])
    if elem_type != _FLOAT:
        value = writer.add("Cast", [value], to=_FLOAT)
    flat = [value, _shape(writer, [-1], value, vocab_size)]
    logits_RV = writer.add("Reshape", flat, "score_logits" if exposes_rows else "")
    is_ready = tokens == TokenForm(_INT64, 2)
    greedy_R1 = writer.add("ArgMax", [logits_RV], NEXT_IDS if is_ready else "", axis=-1, keepdims=1)
    normalizer_R = _log_sum_exp(writer, logits_RV, greedy_R1, vocab_size)
    target_T2 = writer.add("Concat", [_column(writer, "target_rows"), _column(writer, "target_ids")], axis=1)
    logit_T = writer.add("GatherND", [logits_RV, target_T2])
    normalizer_T = writer.add("Gather", [normalizer_R, "target_rows"], axis=0)
    target_logprobs = writer.output("target_logprobs", _FLOAT, ["T"])
    writer.add("Sub", [logit_T, normalizer_T], target_logprobs)
    greedy_ids = writer.output("greedy_ids", _INT64, ["R"])
    greedy = writer.add("Reshape", [greedy_R1, writer.integers([-1])])
    writer.add("Slice", [greedy, writer.integers([0]), writer.add("Shape", ["score_rows"])], greedy_ids)
    if tokens is not None:
        _next_ids(writer, greedy_R1, tokens)
    width = "V" if vocab_size is None else vocab_size
    sample_logits = writer.output("sample_logits", _FLOAT, ["K", width])
    writer.add("Gather", [logits_RV, "sample_rows"], sample_logits, axis=0)
    if exposes_rows:
        writer.output("score_logits", _FLOAT, ["max(R, 1)", width])


def _next_ids(writer: NodeWriter, greedy_R1: str, tokens: TokenForm) -> None:
    """The output of that form. Where ArgMax gives it no node is added, since a device may have none for int64."""
    shape: list[int | str] = ["max(R, 1)", 1]
    writer.output(NEXT_IDS, tokens.elem_type, shape[: tokens.rank])
    if greedy_R1 != NEXT_IDS:
        shaped = writer.add("Reshape", [greedy_R1, writer.integers([-1, 1][: tokens.rank])])
        writer.add("Cast", [shaped], NEXT_IDS, to=tokens.elem_type)


def _column(writer: NodeWriter, value: str) -> str:
    """[N] as [N, 1]."""
    return writer.add("Reshape", [value, writer.integers([-1, 1])])


def _log_sum_exp(writer: NodeWriter, logits_RV: str, greedy_R1: str, vocab_size: int | None) -> str:
    """log(sum(exp(logits))) over V: float32[R].

    Not ReduceLogSumExp, which on CPU adds one element after the other: it loses up to 4e-3 nats over 150,000 tokens,
    and takes ten times as long. The sum in two stages of about sqrt(V) elements keeps the error near 1e-6. The largest
    logit is looked up where ArgMax found it, because ReduceMax would read all of them again.
    """
    largest_R1 = writer.add("GatherElements", [logits_RV, greedy_R1], axis=1)
    terms = writer.add("Exp", [writer.add("Sub", [logits_RV, largest_R1])])
    logarithm_R1 = writer.add("Log", [sum_of_rows(writer, terms, vocab_size)])
    return writer.add("Reshape", [writer.add("Add", [logarithm_R1, largest_R1]), writer.integers([-1])])


def _head_of_rows(writer: NodeWriter, head: Head) -> str:
    """The head's nodes once more, over the picked rows. Without reshapes: the last one is added when scoring."""
    value = _pick_rows(writer, head.rows, head.hidden_size, is_flat=head.is_flat)
    renames = {head.rows: value}
    for node in head.nodes:
        if node.op_type in LAYOUT:
            renames[node.output[0]] = renames[node.input[0]]
        else:
            renames[node.output[0]] = writer.clone(node, renames)
    return renames[head.nodes[-1].output[0]]


def _pick_rows(writer: NodeWriter, value: str, size: int | None, *, is_flat: bool) -> str:
    """`score_rows` of [.., size]: [R, size] where flat, else [1, R, size], for the product to keep its rank.

    With R = 0 it picks row 0, because reductions over no rows return the wrong shape on CPU, and fail elsewhere.
    """
    writer.input("score_rows", _INT64, ["R"])
    padded = writer.add("Concat", ["score_rows", writer.integers([0])], axis=0)
    candidates = writer.add("Concat", [writer.add("Shape", ["score_rows"]), writer.integers([1])], axis=0)
    count = writer.reduce("ReduceMax", candidates, keepdims=1)
    rows = writer.add("Slice", [padded, writer.integers([0]), count])
    lead = [-1] if is_flat else [1, -1]
    merged = writer.add("Reshape", [value, _shape(writer, lead, value, size)])
    return writer.add("Gather", [merged, rows], axis=len(lead) - 1)


def _shape(writer: NodeWriter, lead: Sequence[int], value: str, size: int | None) -> str:
    """The shape [*lead, size of the last axis of `value`]."""
    if size is not None:
        return writer.integers([*lead, size])
    last = writer.add("Gather", [writer.add("Shape", [value]), writer.integers([-1])], axis=0)
    return writer.add("Concat", [writer.integers(lead), last], axis=0)


def _output(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    outputs: dict[str, onnx.ValueInfoProto] = {output.name: output for output in model.graph.output}
    if name not in outputs:
        raise ModelError(f"the graph has no output '{name}'; it has {', '.join(outputs)}")
    return outputs[name]


def _static_dim(value: onnx.ValueInfoProto, axis: int) -> int | None:
    dims = value.type.tensor_type.shape.dim
    if not dims or not dims[axis].HasField("dim_value"):
        return None
    return int(dims[axis].dim_value)


def _is_cut_to_last(graph: onnx.GraphProto, logits_name: str) -> bool:
    """Whether the head's rows come from a Gather on the positions, with or without an Unsqueeze, as exporters prune."""
    try:
        head = find_head(graph, logits_name, None)
    except NotUnderstood:
        return False
    producers = {name: node for node in graph.node for name in node.output}
    node = producers.get(head.rows)
    while node is not None and node.op_type in LAYOUT:
        node = producers.get(node.input[0])
    if node is None or node.op_type != "Gather":
        return False
    axis = next((entry.i for entry in node.attribute if entry.name == "axis"), 0)
    return axis in (1, -2)
