"""Graphs that compare two distributions over the vocabulary on the device: from rows of logits to a few numbers a row.

`divergence_graph` compares two rows of logits exactly. `record_graph` makes a short record of a row, and
`recorded_graph` compares a row with such a record. Models of their own, without weights; know no decoder.

Axes: R rows, V vocabulary, K most probable tokens, D drawn tokens, N = K + D tokens of a record, B tokens of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from olive_ext.graph.nodes import NewGraph, NodeWriter

_FLOAT = onnx.TensorProto.FLOAT
_INT64 = onnx.TensorProto.INT64
_BELOW_ONE = 1 - 2.0**-20
"""Keeps a threshold under the sum it is compared with, whatever was rounded."""


def divergence_graph(vocab_size: int, reference_size: int, num_tokens: int) -> bytes:
    """KL of rows of logits in both directions over the first `num_tokens` ids: no token has those beyond.

    Inputs: `reference_logits` float32[R, `reference_size`] and `logits` float32[R, `vocab_size`], `reference_ids` and
    `ids` int64[R, 1], where each is largest.
    Outputs, float32[R], nats: `kl`, KL(reference || candidate); `kl_reverse`, KL(candidate || reference);
    `reference_top_logprobs`, the reference's log-probability of `reference_ids`; `top_logprobs`, the candidate's of the
    same. R is 1 or more. With p the reference and q the candidate:

        kl = sum of p (log p - log q) = sum of e (a - b) / sum of e - log(sum of e) + log(sum of exp b)

    where a and b are the logits less their largest and e = exp a. Equal logits give exactly 0. What ids beyond take of
    p is left out; what they take of q is, up to as much, and counts beyond it, because a candidate writes nothing then.
    `kl_reverse` leaves all of both out.
    """
    writer = _begin("divergence", reference_logits=reference_size, logits=vocab_size, reference_ids=1, ids=1)
    whole = _Softmax.of(writer, "reference_logits", "reference_ids", reference_size)
    whole_candidate = _Softmax.of(writer, "logits", "ids", vocab_size)
    reference = whole.first(writer, num_tokens, reference_size)
    candidate = whole_candidate.first(writer, num_tokens, vocab_size)
    # A token of probability 0 adds nothing, even where the candidate's logit is -inf and the product is not a number.
    difference = writer.add("Sub", [reference.below, candidate.below])
    mean, moved = (_mean_under(writer, one, difference, num_tokens) for one in (reference, candidate))
    constant = writer.add("Sub", [whole_candidate.log_sum, whole.log_sum])
    if num_tokens < max(vocab_size, reference_size):
        beyond = writer.add("Div", [whole.sum, reference.sum])
        taken = writer.add("Min", [writer.add("Div", [whole_candidate.sum, candidate.sum]), beyond])
        constant = writer.add("Sub", [constant, writer.add("Log", [writer.add("Div", [taken, beyond])])])
    # Not below 0, where rounding leads for all but equal distributions.
    _flat(writer, writer.add("Max", [writer.add("Add", [mean, constant]), writer.number(0.0)]), "kl")
    reverse = writer.add("Sub", [writer.add("Sub", [reference.log_sum, candidate.log_sum]), moved])
    _flat(writer, writer.add("Max", [reverse, writer.number(0.0)]), "kl_reverse")
    _flat(writer, writer.add("Neg", [whole.log_sum]), "reference_top_logprobs")
    is_longer = reference_size > vocab_size
    known = writer.add("Min", ["reference_ids", writer.integers([vocab_size - 1])]) if is_longer else "reference_ids"
    _flat(writer, whole_candidate.logprobs(writer, known), "top_logprobs")
    return writer.serialized()


def record_graph(vocab_size: int, top: int, drawn: int) -> bytes:
    """Records of rows of logits: the `top` most probable tokens, and `drawn` tokens drawn from the others, the tail, in
    proportion to their probability, with replacement.

    Inputs: `logits` float32[R, V], `uniforms` float32[R, D] in [0, 1). Outputs: `ids` int64[R, N] and `logprobs`
    float32[R, N], the top tokens first, falling; `tail` float32[R], the tail's probability. Where `uniforms` are spread
    over D equal parts of [0, 1), the draws are stratified over the vocabulary's order, which never makes the estimate's
    variance larger.
    """
    writer = _begin("record", logits=vocab_size, uniforms=drawn)
    largest_RK, top_RK = "largest", "top"
    writer.add_named("TopK", ["logits", writer.integers([top])], [largest_RK, top_RK], axis=-1)
    first = writer.integers([0])
    row = _Softmax.of(
        writer, "logits", writer.add("Slice", [top_RK, first, writer.integers([1]), writer.integers([1])]), vocab_size
    )
    nothing = writer.add("Sub", [largest_RK, largest_RK])
    tail_RV = writer.add("ScatterElements", [row.terms, top_RK, nothing], axis=1)
    drawn_RD, total = _draw(writer, tail_RV, vocab_size)
    ids = writer.output("ids", _INT64, ["R", top + drawn])
    writer.add("Concat", [top_RK, drawn_RD], ids, axis=1)
    logprobs = writer.output("logprobs", _FLOAT, ["R", top + drawn])
    writer.add("Identity", [row.logprobs(writer, ids)], logprobs)
    _flat(writer, writer.add("Div", [total, row.sum]), "tail")
    return writer.serialized()


def recorded_graph(vocab_size: int, top: int, drawn: int, num_tokens: int | None = None) -> bytes:
    """KL(reference || candidate) of rows of logits whose reference is a record. Ids from `num_tokens` on are taken for
    as probable in both: no token has them.

    Inputs: `logits` float32[R, V], `ids` int64[R, 1] (where it is largest), and a record as `record_graph` makes it:
    `record_ids` int64[R, N], `record_logprobs` float32[R, N], `tail` float32[R, 1]. Outputs, float32[R], nats: `kl`,
    unbiased; `kl_variance` of that estimate, over what might have been drawn; `kl_lower`, at most the true value (the
    tail taken as one token); `top_logprobs`, the candidate's of the reference's most probable token.

    With x = log p - log q and P and Q the tail's probability under both, `kl` is the exact sum over the top tokens and

        tail = P mean of (x + w (r - 1))      r = (q / Q) / (p / P)      w = s / (exp(s) - 1)

    over the drawn tokens. The mean of r is 1, so that its weight changes the variance only; w is the best weight
    where x is normal with variance s, which is taken from the top tokens. (Control variates: Owen, Monte Carlo theory,
    8.9; with w = 1 and P = Q it is Schulman's estimator k3, "Approximating KL divergence", 2020.)
    """
    width = top + drawn
    writer = _begin("recorded", logits=vocab_size, ids=1, record_ids=width, record_logprobs=width, tail=1)
    candidate = _Softmax.of(writer, "logits", "ids", vocab_size)
    if num_tokens is None:
        logq_RN = candidate.logprobs(writer, "record_ids")
    else:
        logq_RN = candidate.logprobs(writer, writer.add("Min", ["record_ids", writer.integers([vocab_size - 1])]))
        is_token = writer.add("Less", ["record_ids", writer.integers([num_tokens])])
        logq_RN = writer.add("Where", [is_token, logq_RN, "record_logprobs"])
    x_top, x_drawn = _split(writer, writer.add("Sub", ["record_logprobs", logq_RN]), top)
    p_top = writer.add("Exp", [_split(writer, "record_logprobs", top)[0]])
    logq_top, _ = _split(writer, logq_RN, top)
    exact = _sum(writer, writer.add("Mul", [p_top, x_top]))
    log_ratio = _log_tail_ratio(writer, p_top, logq_top)
    weight = _control_weight(writer, p_top, x_top, exact)
    mean, squares = _drawn_moments(writer, x_drawn, log_ratio, weight)
    scaled = writer.add("Mul", ["tail", writer.add("Mul", ["tail", squares])])
    _flat(writer, writer.add("Add", [exact, writer.add("Mul", ["tail", mean])]), "kl")
    _flat(writer, writer.add("Div", [scaled, writer.number(float(drawn * (drawn - 1)))]), "kl_variance")
    _flat(writer, writer.add("Add", [exact, writer.add("Mul", ["tail", log_ratio])]), "kl_lower")
    _flat(writer, _split(writer, logq_RN, 1)[0], "top_logprobs")
    return writer.serialized()


def _mean_under(writer: NodeWriter, weights: _Softmax, values_RV: str, num_columns: int) -> str:
    """The mean of values under a distribution, [R, 1]; values of tokens with probability 0 may be no numbers."""
    product = writer.add("Mul", [weights.terms, values_RV])
    is_possible = writer.add("Greater", [weights.terms, writer.number(0.0)])
    terms = writer.add("Where", [is_possible, product, writer.number(0.0)])
    return writer.add("Div", [writer.sum_columns(terms, num_columns), weights.sum])


def _log_tail_ratio(writer: NodeWriter, p_top: str, logq_top: str) -> str:
    """log(P / Q) of the tail's probabilities, [R, 1]; both are taken as 1e-9 at least."""
    # Not 1 - sum of q: this way equal models get equal tails, to the last bit.
    moved = _sum(writer, writer.add("Sub", [p_top, writer.add("Exp", [logq_top])]))
    tail_q = writer.add("Max", [writer.add("Add", ["tail", moved]), writer.number(1e-9)])
    tail_p = writer.add("Max", ["tail", writer.number(1e-9)])
    return writer.add("Sub", [writer.add("Log", [tail_p]), writer.add("Log", [tail_q])])


def _drawn_moments(writer: NodeWriter, x_drawn: str, log_ratio: str, weight: str) -> tuple[str, str]:
    """Mean of x + w (r - 1) over the drawn tokens, and the sum of squared deviations from it; [R, 1] each."""
    ratio = writer.add("Exp", [writer.add("Sub", [log_ratio, x_drawn])])
    excess = writer.add("Mul", [weight, writer.add("Sub", [ratio, writer.number(1.0)])])
    sample = writer.add("Add", [x_drawn, excess])
    mean = writer.reduce("ReduceMean", sample, keepdims=1)
    deviation = writer.add("Sub", [sample, mean])
    return mean, _sum(writer, writer.add("Mul", [deviation, deviation]))


@dataclass(frozen=True)
class _Softmax:
    """Names of a row's parts: logits less the largest, exponentials [R, V], their sum and its logarithm [R, 1]."""

    below: str
    terms: str
    sum: str
    log_sum: str

    @classmethod
    def of(cls, writer: NodeWriter, logits_RV: str, ids_R1: str, vocab_size: int) -> _Softmax:
        largest = writer.add("GatherElements", [logits_RV, ids_R1], axis=1)
        below = writer.add("Sub", [logits_RV, largest])
        terms = writer.add("Exp", [below])
        total = writer.sum_columns(terms, vocab_size)
        return cls(below, terms, total, writer.add("Log", [total]))

    def first(self, writer: NodeWriter, count: int, size: int) -> _Softmax:
        """The first `count` of `size` columns."""
        if count == size:
            return self
        ends = [writer.integers([0]), writer.integers([count]), writer.integers([1])]
        below, terms = (writer.add("Slice", [value, *ends]) for value in (self.below, self.terms))
        total = writer.sum_columns(terms, count)
        return _Softmax(below, terms, total, writer.add("Log", [total]))

    def logprobs(self, writer: NodeWriter, ids_RN: str) -> str:
        """Log-probabilities of the tokens `ids_RN`."""
        return writer.add("Sub", [writer.add("GatherElements", [self.below, ids_RN], axis=1), self.log_sum])


def _draw(writer: NodeWriter, weights_RV: str, vocab_size: int) -> tuple[str, str]:
    """Ids [R, D] at which the running sum of weights passes `uniforms` times the whole, and that whole [R, 1].

    The running sum is taken over blocks of somewhat less than sqrt(V) weights, then inside the blocks that are hit: a
    sum over all V would round away small weights, and comparing all of it with every threshold would cost D times V.
    """
    block = 1 << int(math.log2(math.sqrt(vocab_size) / 1.5 + 1))
    num_blocks = -(-vocab_size // block)
    if missing := num_blocks * block - vocab_size:
        pads = writer.integers([0, 0, 0, missing])
        weights_RV = writer.add("Pad", [weights_RV, pads])
    blocks = writer.add("Reshape", [weights_RV, writer.integers([-1, num_blocks, block])])
    ends = writer.add("CumSum", [writer.reduce("ReduceSum", blocks), writer.integers(1)])
    total = _last(writer, ends)
    below = writer.add("Mul", [total, writer.number(_BELOW_ONE)])
    threshold_RD = writer.add("Min", [writer.add("Mul", ["uniforms", total]), below])
    block_RD = _count_passed(writer, _unsqueeze(writer, ends, 1), threshold_RD, num_blocks)
    starts = writer.add("Pad", [ends, writer.integers([0, 1, 0, 0])])
    start_RD = writer.add("GatherElements", [starts, block_RD], axis=1)
    hit_RDB = writer.add("GatherND", [blocks, _unsqueeze(writer, block_RD, 2)], batch_dims=1)
    inner_RDB = writer.add("CumSum", [hit_RDB, writer.integers(2)])
    rest = writer.add("Max", [writer.add("Sub", [threshold_RD, start_RD]), writer.number(0.0)])
    inner_end = writer.add("Squeeze", [_last(writer, inner_RDB), writer.integers([2])])
    rest_RD = writer.add("Min", [rest, writer.add("Mul", [inner_end, writer.number(_BELOW_ONE)])])
    place_RD = _count_passed(writer, inner_RDB, rest_RD, block)
    ids = writer.add("Add", [writer.add("Mul", [block_RD, writer.integers([block])]), place_RD])
    # Only where there is no tail at all the count runs past the end, and then the tail's weight is 0.
    return writer.add("Min", [ids, writer.integers([vocab_size - 1])]), total


def _count_passed(writer: NodeWriter, ends: str, threshold_RD: str, limit: int) -> str:
    """How many of `ends` [R, 1 or D, M] are not above each threshold, and at most `limit` - 1: int64[R, D]."""
    passed = writer.add("LessOrEqual", [ends, _unsqueeze(writer, threshold_RD, 2)])
    # Counted in float32, which is exact here and many times as fast as int64 on CPU.
    count = writer.reduce("ReduceSum", writer.add("Cast", [passed], to=_FLOAT))
    return writer.add("Min", [writer.add("Cast", [count], to=_INT64), writer.integers([limit - 1])])


def _control_weight(writer: NodeWriter, p_top: str, x_top: str, exact: str) -> str:
    """s / (exp(s) - 1) for the variance s of x among the top tokens, weighted by p: [R, 1]."""
    mass = _sum(writer, p_top)
    deviation = writer.add("Sub", [x_top, writer.add("Div", [exact, mass])])
    squares = writer.add("Mul", [p_top, writer.add("Mul", [deviation, deviation])])
    variance = writer.add("Div", [_sum(writer, squares), mass])
    bounded = writer.add("Clip", [variance, writer.number(1e-3), writer.number(50.0)])
    return writer.add("Div", [bounded, writer.add("Sub", [writer.add("Exp", [bounded]), writer.number(1.0)])])


def _split(writer: NodeWriter, values_RN: str, top: int) -> tuple[str, str]:
    """`values_RN` as [R, K] and [R, D]."""
    cut, end, axis = writer.integers([top]), writer.integers([2**31]), writer.integers([1])
    head = writer.add("Slice", [values_RN, writer.integers([0]), cut, axis])
    return head, writer.add("Slice", [values_RN, cut, end, axis])


def _sum(writer: NodeWriter, values: str) -> str:
    return writer.reduce("ReduceSum", values, keepdims=1)


def _last(writer: NodeWriter, values: str) -> str:
    return writer.add("Slice", [values, writer.integers([-1]), writer.integers([2**31]), writer.integers([-1])])


def _unsqueeze(writer: NodeWriter, value: str, axis: int) -> str:
    return writer.add("Unsqueeze", [value, writer.integers([axis])])


def _flat(writer: NodeWriter, value_R1: str, name: str) -> None:
    writer.add("Reshape", [value_R1, writer.integers([-1])], writer.output(name, _FLOAT, ["R"]))


def _begin(name: str, **widths: int) -> NewGraph:
    writer = NewGraph(name)
    for value, width in widths.items():
        writer.input(value, _INT64 if value.endswith("ids") else _FLOAT, ["R", width])
    return writer
