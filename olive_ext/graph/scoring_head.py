"""The scoring head: replaces a decoder's logits by the log-probabilities and greedy tokens of some rows.

Pure functions from model to model; weights stay where they are. Knows no session and no provider.

Axes: B batch, S positions, H hidden size, V vocabulary, R rows that are scored, T targets, K rows handed out whole.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import onnx

from olive_ext.errors import ModelError
from olive_ext.graph.head_pattern import LAYOUT, NotUnderstood, PickedRows, Walk, find_rows
from olive_ext.graph.nodes import NodeWriter, attribute, default_opset, model_of, remove_dead

_FLOAT = onnx.TensorProto.FLOAT
_INT64 = onnx.TensorProto.INT64
_PREFIX = "olive_ext/scoring"

BANNED = -1e30
"""In place of a logit, below any; not -inf, which shaders need not know."""


@dataclass(frozen=True)
class HeadOutputs:
    """Which outputs the head has besides the scores, and whether its R may be 0."""

    exposes_rows: bool = False
    """Adds the output `score_logits`."""

    has_rows: bool = False
    """R is promised to be never 0, so that no node needs to check."""

    bans: tuple[tuple[int, ...], ...] = ()
    """Lists of tokens that rows must not give; empty where no row has such. Adds the input `score_bans`: for each row
    the number of its list."""


SCORES_ONLY = HeadOutputs()


def add_scoring_head(
    model: onnx.ModelProto, logits_name: str, outputs: HeadOutputs = SCORES_ONLY, *, keeps_layers: str = ""
) -> tuple[onnx.ModelProto, PickedRows]:
    """A copy of `model` with the head in place of the output `logits_name` [B, S, V], and the rows that it picks.

    Inputs added, all int64: `score_rows`[R] (indices into the flattened B*S), `target_rows`[T] and `sample_rows`[K]
    (indices into R), `target_ids`[T]; with bans `score_bans`[max(R, 1)]. Outputs: `target_logprobs` float32[T],
    `greedy_ids` int64[R], `sample_logits` float32[K, V], which are log-probabilities: tokens that are banned have
    `BANNED` there and are not among the greedy ones, and all other numbers are as without bans. R, T and K may be 0. On
    request also `score_logits` float32[R, V], for use on the device; where R is 0 it has one row of no meaning.

    Rows are picked after the last attention, or where that cannot be done, before the product with the vocabulary, or
    from the logits. `keeps_layers` is a reason for which all layers must run on all rows; empty where there is none.
    Raises ModelError when the output is missing, is pruned, or a name of the head is taken.
    """
    logits = check_scoring(model, logits_name)
    edited = deepcopy(model)
    graph = edited.graph
    elem_type = logits.type.tensor_type.elem_type
    writer = NodeWriter(graph, default_opset(edited), _PREFIX)
    rows = find_rows(graph, logits_name, _static_dim(logits, -1), keeps_layers)
    value = _logits_of(writer, rows, logits_name, has_rows=outputs.has_rows)
    del graph.output[[output.name for output in graph.output].index(logits_name)]
    _score(writer, value, elem_type, rows.vocab_size, outputs)
    remove_dead(graph, logits_name)
    return edited, rows


def _logits_of(writer: NodeWriter, rows: PickedRows, logits_name: str, *, has_rows: bool) -> str:
    """Adds the input `score_rows`[R], int64, indices into the flattened B*S, and the nodes from the picked rows to the
    logits once more; returns the logits' name. The head's reshapes are left out: `_score` adds the last one.

    With `has_rows` R is never 0. Without it row 0 is picked where R = 0, because reductions over no rows return the
    wrong shape on CPU, and fail elsewhere.
    """
    index = writer.input("score_rows", _INT64, ["R"])
    if not has_rows:
        padded = writer.add("Concat", [index, writer.integers([0])], axis=0)
        candidates = writer.add("Concat", [writer.add("Shape", [index]), writer.integers([1])], axis=0)
        count = writer.reduce("ReduceMax", candidates, keepdims=1)
        index = writer.add("Slice", [padded, writer.integers([0]), count])
    renames: dict[str, str] = {}
    for value, (width, is_flat) in rows.values.items():
        lead = [-1] if is_flat else [1, -1]  # operators keep their rank
        merged = writer.add("Reshape", [value, writer.shape(lead, value, width)])
        renames[value] = writer.add("Gather", [merged, index], axis=len(lead) - 1)
    for node in rows.nodes:
        given, made = str(node.input[0]), str(node.output[0])
        if node.op_type not in LAYOUT:
            renames |= writer.clone(node, renames)
        elif made in rows.shapes:
            renames[made] = writer.add("Reshape", [renames[given], writer.integers(rows.shapes[made])])
        else:
            renames[made] = renames[given]
    return renames[logits_name]


def scoring_graph(
    elem_type: int, vocab_size: int | None = None, rank: int = 3, outputs: HeadOutputs = SCORES_ONLY
) -> onnx.ModelProto:
    """The head as a model of its own over an input `logits`: [B, S, V], or [N, V] where the `rank` is 2."""
    graph = onnx.GraphProto(name="scoring")
    writer = NodeWriter(graph, 21, _PREFIX)
    writer.input("logits", elem_type, [*("B", "S")[3 - rank :], "V" if vocab_size is None else vocab_size])
    rows = PickedRows("logits", "", vocab_size, {"logits": (vocab_size, True)})
    value = _logits_of(writer, rows, "logits", has_rows=outputs.has_rows)
    _score(writer, value, elem_type, vocab_size, outputs)
    return model_of(graph, 21)


def check_scoring(model: onnx.ModelProto, logits_name: str) -> onnx.ValueInfoProto:
    """The output, which holds logits of every position. Raises ModelError where it does not."""
    outputs: dict[str, onnx.ValueInfoProto] = {output.name: output for output in model.graph.output}
    if logits_name not in outputs:
        raise ModelError(f"the graph has no output '{logits_name}'; it has {', '.join(outputs)}")
    logits = outputs[logits_name]
    rank = len(logits.type.tensor_type.shape.dim) if logits.type.tensor_type.HasField("shape") else 3
    if rank not in (2, 3):
        raise ModelError(f"output '{logits_name}' has rank {rank}; 2 and 3 are scored: [batch,] positions, vocabulary")
    if (rank == 3 and _static_dim(logits, 1) == 1) or _is_cut_to_last(model.graph, logits_name):
        raise ModelError(
            f"output '{logits_name}' has the last position only (a pruned LM head): export the model without it"
        )
    return logits


def _score(writer: NodeWriter, value: str, elem_type: int, vocab_size: int | None, outputs: HeadOutputs) -> None:
    """Adds the nodes from `value`, logits [.., R, V] of `elem_type`, to the outputs."""
    for name, axis in (("target_rows", "T"), ("target_ids", "T"), ("sample_rows", "K")):
        writer.input(name, _INT64, [axis])
    if elem_type != _FLOAT:
        value = writer.add("Cast", [value], to=_FLOAT)
    flat = [value, writer.shape([-1], value, vocab_size)]
    logits_RV = writer.add("Reshape", flat, "score_logits" if outputs.exposes_rows else "")
    allowed_RV = _allowed(writer, logits_RV, vocab_size, outputs.bans) if outputs.bans else logits_RV
    target_logprobs = writer.output("target_logprobs", _FLOAT, ["T"])
    greedy_ids = writer.output("greedy_ids", _INT64, ["R"])
    if outputs.has_rows:
        greedy_R = writer.add("ArgMax", [allowed_RV], greedy_ids, axis=-1, keepdims=0)
        greedy_R1 = _column(writer, greedy_R)
    else:
        greedy_R1 = writer.add("ArgMax", [allowed_RV], axis=-1, keepdims=1)
        greedy = writer.add("Reshape", [greedy_R1, writer.integers([-1])])
        writer.add("Slice", [greedy, writer.integers([0]), writer.add("Shape", ["score_rows"])], greedy_ids)
    largest_R1 = writer.add("ArgMax", [logits_RV], axis=-1, keepdims=1) if outputs.bans else greedy_R1
    normalizer_R = _log_sum_exp(writer, logits_RV, largest_R1, vocab_size)
    target_T2 = writer.add("Concat", [_column(writer, "target_rows"), _column(writer, "target_ids")], axis=1)
    logit_T = writer.add("GatherND", [logits_RV, target_T2])
    normalizer_T = writer.add("Gather", [normalizer_R, "target_rows"], axis=0)
    writer.add("Sub", [logit_T, normalizer_T], target_logprobs)
    width = "V" if vocab_size is None else vocab_size
    sample_logits = writer.output("sample_logits", _FLOAT, ["K", width])
    sampled_KV = writer.add("Gather", [allowed_RV, "sample_rows"], axis=0)
    normalizer_K = writer.add("Gather", [normalizer_R, "sample_rows"], axis=0)
    writer.add("Sub", [sampled_KV, _column(writer, normalizer_K)], sample_logits)
    if outputs.exposes_rows:
        writer.output("score_logits", _FLOAT, ["max(R, 1)", width])


def _allowed(writer: NodeWriter, logits_RV: str, vocab_size: int | None, bans: tuple[tuple[int, ...], ...]) -> str:
    """The logits, with `BANNED` added to those of the tokens that a row must not give."""
    if vocab_size is None:
        raise ModelError("tokens are suppressed, and the graph does not show how many there are")
    writer.input("score_bans", _INT64, ["max(R, 1)"])
    rows = [[BANNED if token in banned else 0.0 for token in range(vocab_size)] for banned in map(frozenset, bans)]
    bias_RV = writer.add("Gather", [writer.table(rows), "score_bans"], axis=0)
    return writer.add("Add", [logits_RV, bias_RV])


def _column(writer: NodeWriter, value: str) -> str:
    return writer.add("Reshape", [value, writer.integers([-1, 1])])


def _log_sum_exp(writer: NodeWriter, logits_RV: str, where_R1: str, vocab_size: int | None) -> str:
    """log(sum(exp(logits))) over V: float32[R].

    Not ReduceLogSumExp, which on CPU adds one element after the other: it loses up to 4e-3 nats over 150,000 tokens,
    and takes ten times as long. The sum in two stages of about sqrt(V) elements keeps the error near 1e-6. The largest
    logit is looked up where ArgMax found it, because ReduceMax would read all of them again.
    """
    largest_R1 = writer.add("GatherElements", [logits_RV, where_R1], axis=1)
    terms = writer.add("Exp", [writer.add("Sub", [logits_RV, largest_R1])])
    logarithm_R1 = writer.add("Log", [writer.sum_columns(terms, vocab_size)])
    return writer.add("Reshape", [writer.add("Add", [logarithm_R1, largest_R1]), writer.integers([-1])])


def _static_dim(value: onnx.ValueInfoProto, axis: int) -> int | None:
    dims = value.type.tensor_type.shape.dim
    if not dims or not dims[axis].HasField("dim_value"):
        return None
    return int(dims[axis].dim_value)


def _is_cut_to_last(graph: onnx.GraphProto, logits_name: str) -> bool:
    """Whether the head's rows come from a Gather on the positions, with or without an Unsqueeze, as exporters prune."""
    walk = Walk(graph)
    try:
        head = walk.find_head(logits_name, None)
    except NotUnderstood:
        return False
    (rows,) = head.values
    node = walk.producers.get(rows)
    while node is not None and node.op_type in LAYOUT:
        node = walk.producers.get(node.input[0])
    return node is not None and node.op_type == "Gather" and attribute(node, "axis", 0) in (1, -2)
