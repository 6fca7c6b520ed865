"""The scoring head: replaces a decoder's logits by the log-probabilities and greedy tokens of some rows.

Pure functions from model to model; weights stay where they are. Knows no session and no provider.

Axes: B batch, S positions, H hidden size, V vocabulary, R rows that are scored, T targets, K rows handed out whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import onnx

from olive_ext.errors import ModelError
from olive_ext.graph.head_pattern import LAYOUT, HeadPattern, NotUnderstood, Walk, domain, label, refusal
from olive_ext.graph.nodes import NodeWriter, attribute, default_opset, model_of, reads, remove_dead
from olive_ext.graph.value_shapes import REDUCTIONS, SKIP_NORMS, factors

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


@dataclass(frozen=True)
class ScoringGraph:
    """A decoder whose logits output is replaced.

    Inputs added, all int64: `score_rows`[R] (indices into the flattened B*S), `target_rows`[T] and `sample_rows`[K]
    (indices into R), `target_ids`[T]; with bans `score_bans`[max(R, 1)]. Outputs: `target_logprobs` float32[T],
    `greedy_ids` int64[R], `sample_logits` float32[K, V], which are log-probabilities: tokens that are banned have
    `BANNED` there and are not among the greedy ones, and all other numbers are as without bans. R, T and K may be 0. On
    request also `score_logits` float32[R, V], for use on the device; where R is 0 it has one row of no meaning.
    """

    model: onnx.ModelProto
    kind: Literal["hidden", "logits"]
    """Rows are picked from hidden states, before the product with the vocabulary or further up, or from the logits."""

    reason: str
    """One sentence for `olive-ext check`: which pattern was recognised, or why none was."""

    vocab_size: int | None
    """None where neither the logits' shape nor the weight's is known."""

    late_products: tuple[tuple[int, int], ...] = ()
    """(inner size, columns) of the products besides the head's that run on the scored rows only; 0 where not known."""


def add_scoring_head(
    model: onnx.ModelProto, logits_name: str, outputs: HeadOutputs = SCORES_ONLY, *, keeps_layers: str = ""
) -> ScoringGraph:
    """A copy of `model` with the head in place of the output `logits_name` [B, S, V]; its other outputs stay.

    Rows are picked after the last attention, or where that cannot be done, before the product with the vocabulary, or
    from the logits. `keeps_layers` is a reason for which all layers must run on all rows; empty where there is none.
    Raises ModelError when the output is missing, is pruned, or a name of the head is taken.
    """
    check_scoring(model, logits_name)
    edited = deepcopy(model)
    graph = edited.graph
    logits = _output(edited, logits_name)
    elem_type = logits.type.tensor_type.elem_type
    vocab_size = _static_dim(logits, -1)
    writer = NodeWriter(graph, default_opset(edited), _PREFIX)
    picker = RowPicker(writer, has_rows=outputs.has_rows)
    walk = Walk(graph)
    kind: Literal["hidden", "logits"] = "hidden"
    products: tuple[tuple[int, int], ...] = ()
    try:
        head = walk.find_head(logits_name, vocab_size)
    except NotUnderstood as error:
        value = picker.pick(logits_name, vocab_size, is_flat=True)
        kind, reason = "logits", f"rows are picked from the logits: {error}"
    else:
        vocab_size = head.vocab_size
        late = keeps_layers or find_late_rows(walk, head, logits_name)
        reason = _describe(head, late)
        products = () if isinstance(late, str) else late.products
        value = _head_of_rows(writer, picker, head, late)
    del graph.output[[output.name for output in graph.output].index(logits_name)]
    _score(writer, value, elem_type, vocab_size, outputs)
    remove_dead(graph, logits_name)
    return ScoringGraph(edited, kind, reason, vocab_size, products)


def scoring_graph(
    elem_type: int, vocab_size: int | None = None, rank: int = 3, outputs: HeadOutputs = SCORES_ONLY
) -> onnx.ModelProto:
    """The head as a model of its own over an input `logits`: [B, S, V], or [N, V] where the `rank` is 2."""
    graph = onnx.GraphProto(name="scoring")
    writer = NodeWriter(graph, 21, _PREFIX)
    writer.input("logits", elem_type, [*("B", "S")[3 - rank :], "V" if vocab_size is None else vocab_size])
    value = RowPicker(writer, has_rows=outputs.has_rows).pick("logits", vocab_size, is_flat=True)
    _score(writer, value, elem_type, vocab_size, outputs)
    return model_of(graph, 21)


def check_scoring(model: onnx.ModelProto, logits_name: str) -> None:
    """Raises ModelError unless the output holds logits of every position."""
    logits = _output(model, logits_name)
    rank = len(logits.type.tensor_type.shape.dim) if logits.type.tensor_type.HasField("shape") else 3
    if rank not in (2, 3):
        raise ModelError(f"output '{logits_name}' has rank {rank}; 2 and 3 are scored: [batch,] positions, vocabulary")
    if (rank == 3 and _static_dim(logits, 1) == 1) or _is_cut_to_last(model.graph, logits_name):
        raise ModelError(
            f"output '{logits_name}' has the last position only (a pruned LM head): export the model without it"
        )


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


def _describe(head: HeadPattern, late: LateRows | str) -> str:
    if isinstance(late, str):
        return f"rows are picked before {head.product}, which computes the logits, and not further up: {late}"
    where = f"after the last {' and '.join(late.last_mixing) or 'operator that mixes positions'}"
    number = len(late.products)
    products = "product runs" if number == 1 else "products run"
    return f"rows are picked {where}: besides the head's {head.product}, {number} {products} on scored rows only"


def _head_of_rows(writer: NodeWriter, picker: RowPicker, head: HeadPattern, late: LateRows | str) -> str:
    """Adds the head's nodes once more, over the picked rows, after those of `late`; returns the logits' name. The
    head's reshapes are left out: `_score` adds the last one."""
    if isinstance(late, str):
        renames = {head.rows: picker.pick(head.rows, head.hidden_size, is_flat=head.is_flat)}
    else:
        renames = move_rows(writer, picker, late)
    for node in head.nodes:
        if node.op_type in LAYOUT:
            renames[node.output[0]] = renames[node.input[0]]
        else:
            renames |= writer.clone(node, renames)
    return renames[head.nodes[-1].output[0]]


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
    walk = Walk(graph)
    try:
        head = walk.find_head(logits_name, None)
    except NotUnderstood:
        return False
    node = walk.producers.get(head.rows)
    while node is not None and node.op_type in LAYOUT:
        node = walk.producers.get(node.input[0])
    return node is not None and node.op_type == "Gather" and attribute(node, "axis", 0) in (1, -2)


_ELEMENT_WISE = frozenset(
    {"Abs", "Add", "BiasGelu", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "FastGelu", "Gelu", "HardSigmoid"}
    | {"HardSwish", "Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "QuickGelu"}
    | {"Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh"}
    | {"DequantizeLinear", "QuantizeLinear"}
)
_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
_PRODUCTS = frozenset({"FusedMatMul", "Gemm", "MatMul", "MatMulBnb4", "MatMulNBits"})
"""Products of floats: those of integers may have a scale or a zero point for each row."""

_DOMAINS = frozenset({"", "com.microsoft"})
_SUM_AT = 3
"""Skip*LayerNormalization's output that is the sum before the norm."""


class RowWise:
    """The rules, applied to the nodes of one graph. `rows` is a value whose leading axes are the positions."""

    def __init__(self, walk: Walk, rows: str) -> None:
        self._walk = walk
        self._of = walk.shapes.of
        shape = self._of.get(rows)
        key = None if shape is None else factors(shape[:-1])
        if shape is None or not key:
            raise NotUnderstood(f"the shape of '{rows}' is not known")
        self._key = key

    def is_rows(self, value: str) -> bool:
        """Whether `value` is known to have the positions on its leading axes, and one axis after them."""
        shape = self._of.get(value)
        if shape is None or value in self._walk.constants or len(shape) not in (2, 3):
            return False
        return factors(shape[:-1]) == self._key

    def rank(self, value: str) -> int:
        """3 for [B, S, W], 2 for [B*S, W]."""
        return len(self._of[value])

    def width(self, value: str) -> int | None:
        """W, where it is known."""
        last = self._of[value][-1]
        return last if isinstance(last, int) else None

    def knows(self, node: onnx.NodeProto) -> bool:
        """Whether there is a rule for the node's operator."""
        return domain(node) in _DOMAINS and node.op_type in _RULES

    def carried(self, node: onnx.NodeProto, outputs: Sequence[str]) -> list[str]:
        """The inputs that carry the rows where `outputs` are read. NotUnderstood where there is no rule for it."""
        if not self.knows(node):
            raise refusal(node, "is not known to treat positions one by one")
        found = _RULES[node.op_type](self, node)
        if not found or not all(self.is_rows(value) for value in (*found, *outputs)):
            raise refusal(node, "has values of which it is not known that they hold the positions")
        if node.op_type != "Reshape" and len({self.rank(value) for value in (*found, *outputs)}) != 1:
            raise refusal(node, "changes the number of axes")
        unknown = [name for number, name in enumerate(node.output) if name in outputs and number not in (0, _SUM_AT)]
        if unknown and node.op_type != "Split":
            raise refusal(node, f"has the output '{unknown[0]}' in use")
        return found

    def _element_wise(self, node: onnx.NodeProto) -> list[str]:
        found: list[str] = [value for value in node.input if value and value not in self._walk.constants]
        rank = max((self.rank(value) for value in found if self.is_rows(value)), default=0)
        for value in node.input:
            if not value or value in found:
                continue
            shape = self._of.get(value)
            if shape is None or len(shape) > rank or not self._walk.is_same_for_all_rows(node, value):
                raise refusal(node, f"combines the rows with '{value}', which may differ between rows")
        return found

    def _norm(self, node: onnx.NodeProto) -> list[str]:
        """The first input, or two where a norm adds them; the others must be constants of one axis."""
        num_rows = 2 if node.op_type in SKIP_NORMS else 1
        if self.is_rows(node.input[0]) and attribute(node, "axis", -1) not in (-1, self.rank(node.input[0]) - 1):
            raise refusal(node, "does not only normalize the last axis")
        for value in node.input[num_rows:]:
            if value and (value not in self._walk.constants or len(self._of.get(value, (0, 0))) != 1):
                raise refusal(node, f"has the parameter '{value}', which may differ between rows")
        return list(node.input[:num_rows])

    def _product(self, node: onnx.NodeProto) -> list[str]:
        self._walk.check_product(node)
        return [node.input[0]]

    def _reduction(self, node: onnx.NodeProto) -> list[str]:
        axes = self._walk.shapes.listed(node, "axes", 1)
        return self._on_last_axis(node, axes if attribute(node, "keepdims", 1) else None)

    def _slice(self, node: onnx.NodeProto) -> list[str]:
        return self._on_last_axis(node, self._walk.shapes.listed(node, "axes", 3))

    def _split(self, node: onnx.NodeProto) -> list[str]:
        return self._on_last_axis(node, (attribute(node, "axis", 0),))

    def _on_last_axis(self, node: onnx.NodeProto, axes: Sequence[object] | None) -> list[str]:
        rows, *others = node.input
        is_last = self.is_rows(rows) and axes is not None and tuple(axes) in ((-1,), (self.rank(rows) - 1,))
        if not is_last or any(value and value not in self._walk.constants for value in others):
            raise refusal(node, "does not keep to the last axis")
        return [rows]

    def _concat(self, node: onnx.NodeProto) -> list[str]:
        ranks = {self.rank(value) for value in node.input if self.is_rows(value)}
        if len(ranks) != 1 or attribute(node, "axis", 0) not in (-1, ranks.pop() - 1):
            raise refusal(node, "does not keep to the last axis")
        return list(node.input)

    def _reshape(self, node: onnx.NodeProto) -> list[str]:
        """A reshape that merges or splits B and S, and keeps the rows' width."""
        rows, result = node.input[0], node.output[0]
        if not (self.is_rows(rows) and self.is_rows(result)) or self.width(rows) is None:
            raise refusal(node, "is not known to keep the rows")
        if self.width(rows) != self.width(result):
            raise refusal(node, "changes the width of the rows")
        return [rows]


_RULES: dict[str, Callable[[RowWise, onnx.NodeProto], list[str]]] = {
    **dict.fromkeys(_ELEMENT_WISE, RowWise._element_wise),
    **dict.fromkeys(_PRODUCTS, RowWise._product),
    **dict.fromkeys((*_NORMS, *SKIP_NORMS), RowWise._norm),
    **dict.fromkeys(REDUCTIONS, RowWise._reduction),
    "Concat": RowWise._concat,
    "Reshape": RowWise._reshape,
    "Slice": RowWise._slice,
    "Split": RowWise._split,
}


class RowPicker:
    """Adds the input `score_rows`[R], int64, indices into the flattened B*S.

    With `has_rows` R is never 0. Without it row 0 is picked where R = 0, because reductions over no rows return the
    wrong shape on CPU, and fail elsewhere.
    """

    def __init__(self, writer: NodeWriter, *, has_rows: bool) -> None:
        self._writer = writer
        self._rows = writer.input("score_rows", onnx.TensorProto.INT64, ["R"])
        if has_rows:
            return
        padded = writer.add("Concat", [self._rows, writer.integers([0])], axis=0)
        candidates = writer.add("Concat", [writer.add("Shape", [self._rows]), writer.integers([1])], axis=0)
        count = writer.reduce("ReduceMax", candidates, keepdims=1)
        self._rows = writer.add("Slice", [padded, writer.integers([0]), count])

    def pick(self, value: str, size: int | None, *, is_flat: bool) -> str:
        """The rows of `value` [.., size]: [R, size] where flat, else [1, R, size], for operators to keep their rank."""
        lead = [-1] if is_flat else [1, -1]
        merged = self._writer.add("Reshape", [value, self._writer.shape(lead, value, size)])
        return self._writer.add("Gather", [merged, self._rows], axis=len(lead) - 1)


@dataclass(frozen=True)
class LateRows:
    """The part of the graph that can run on the scored rows only."""

    row_wise: RowWise
    nodes: tuple[onnx.NodeProto, ...]
    """The nodes, in order of execution."""

    values: tuple[str, ...]
    """The values at which the rows are picked."""

    products: tuple[tuple[int, int], ...]
    """(inner size, columns) of the products with weights; 0 where a size is not known."""

    last_mixing: tuple[str, ...]
    """Operators whose results are picked because they mix positions: attentions, or others where there is none."""


def find_late_rows(walk: Walk, head: HeadPattern, logits: str) -> LateRows | str:
    """How far up from `head.rows` rows can be picked; the reason where nothing is gained.

    The search walks up through nodes that treat positions one by one. It ends at values whose node mixes positions, or
    of which another node needs all rows, as the keys and values that the graph returns:

        residual ----------------------+      rows are picked here
        last attention                 |      and here
          product, sum with residual, norm, products of the MLP, sum, norm      on R rows instead of B*S
            head

    A table of rules says which nodes these are; an operator without a rule counts as mixing positions.
    """
    later = {name for node in walk.graph.node for name in node.output if name}
    for node in walk.graph.node:
        if not later.isdisjoint(reads([node])):
            return f"{label(node)} stands before what it reads"
        later.difference_update(node.output)
    try:
        row_wise = RowWise(walk, head.rows)
    except NotUnderstood as error:
        return str(error)
    whole, picked = {output.name for output in walk.graph.output if output.name != logits}, {head.rows}
    moved: list[onnx.NodeProto] = []
    reasons: list[str] = []
    mixing: list[str] = []
    for node in reversed(walk.graph.node):  # after all nodes that read its results; `whole` is needed of all positions
        wanted, is_whole = [name for name in node.output if name in picked], not whole.isdisjoint(node.output)
        if wanted and not is_whole:
            try:
                carried = row_wise.carried(node, wanted)
            except NotUnderstood as error:
                reasons.append(str(error))
            else:
                picked.update(carried)
                moved.append(node)
                if node.op_type != "Reshape":  # its shape is written anew
                    whole.update(value for value in node.input if value and value not in carried)
                continue
        elif wanted:
            reasons.append(f"all rows of {label(node)} are needed elsewhere, too")
        if wanted and not row_wise.knows(node):
            mixing.append(node.op_type)
        if wanted or is_whole:
            whole.update(reads([node]))
    sizes = [walk.sizes(node) for node in reversed(moved) if walk.is_product(node)]
    if not sizes:
        return reasons[0] if reasons else f"'{head.rows}' is an input"
    made = {name for node in moved for name in node.output}
    last_mixing = dict.fromkeys([name for name in mixing if "Attention" in name] or mixing)
    products = tuple((inner or 0, columns or 0) for inner, columns in sizes)
    return LateRows(row_wise, tuple(reversed(moved)), tuple(sorted(picked - made)), products, tuple(last_mixing))


def move_rows(writer: NodeWriter, picker: RowPicker, late: LateRows) -> dict[str, str]:
    """Adds the nodes of `late` once more, over picked rows; returns the new name of each value."""
    width, rank = late.row_wise.width, late.row_wise.rank
    renames = {value: picker.pick(value, width(value), is_flat=rank(value) == 2) for value in late.values}
    for node in late.nodes:
        if node.op_type == "Reshape":
            made, size = str(node.output[0]), width(node.output[0])
            assert size is not None
            shape = writer.integers([-1, size] if rank(made) == 2 else [1, -1, size])
            renames[made] = writer.add("Reshape", [renames[node.input[0]], shape])
        else:
            renames |= writer.clone(node, renames)
    return renames
