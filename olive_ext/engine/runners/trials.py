"""Trials of an opened model. First whether two ways of feeding a few random texts agree, by which forms are tried
before use. Then what no form decides: how many tokens the device attends to rightly, where a text may be cut so that
no bit changes, and whether a text's numbers are its own: fed whole and alone, in parts, after what another text has
left, and beside another text. What no reading of a graph shows, a few random texts do. Knows runners by their steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from olive_ext.engine.runners.runner import Runner, Traits
from olive_ext.engine.step import FEW_READS, Copy, FloatArray, LogitsRow, Row, Step
from olive_ext.errors import RunError
from olive_ext.graph.standalone_graphs import INPUTS, OUTPUT, attention_graph
from olive_ext.media.items import Source
from olive_ext.model.decisions import SHORT_STEP, is_attention_at_risk
from olive_ext.model.providers.bindings import run_graph
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import DecoderSpec, SourceKind

TOLERANCE, MOST = 0.02, 0.3
"""The accepted difference, as a share of the difference between two contexts. Rounding is far below it, and a token
that sees wrong positions far above. Where activations are rounded to few bits, it is three times the difference that
feeding the same tokens one by one makes, up to `MOST`."""

TARGETS = (0, 1, 2, 3)
"""The tokens whose log-probabilities are compared, after each text."""

STEM, SUFFIX = 5, 4
"""The numbers of tokens of a tree's stem, and of each of its two ends."""

Text = tuple[int, ...]


def draw(vocab_size: int) -> Callable[[int], Text]:
    """Makes random texts of given lengths, always the same ones."""
    rng = np.random.default_rng(0)
    return lambda length: tuple(rng.integers(0, vocab_size, length).tolist())


def targets_of(num_rows: int) -> tuple[tuple[int, int], ...]:
    """`TARGETS` after each logits row of a step."""
    return tuple((row, token) for row in range(num_rows) for token in TARGETS)


def read_end(tokens: Text, past: int = 0) -> Step:
    """A step of `tokens`, of which `past` are resident, that reads `TARGETS` after them."""
    return Step((Row(0, past, tokens[past:]),), (LogitsRow(0, len(tokens) - past - 1),), targets_of(1))


def score(runner: Runner, tokens: Text, past: int = 0) -> FloatArray:
    """Log-probabilities [T] in nats of `TARGETS` after `tokens`, of which `past` are resident."""
    return runner.run(read_end(tokens, past)).target_logprobs[: len(TARGETS)]


Together = Callable[[Text, Text, Text], FloatArray]
"""Runs steps on a stem and two ends after it; returns the log-probabilities [2 T] after both ends."""


def two_ends_problem(
    runner: Runner, vocab_size: int, step: str, what: str, together: Together, cells: int = 0
) -> str | None:
    """Why steps (`what`, such as a `step`) must not be used; None where their scores equal those of single rows."""
    stem, left, right = map(draw(vocab_size), (STEM, SUFFIX, SUFFIX))
    runner.reserve(STEM + SUFFIX, cells)
    try:
        expected = [score(runner, stem + end) for end in (left, right)]
        again = score(runner, stem)
        for past in range(STEM, STEM + SUFFIX):
            again = score(runner, (stem + right)[: past + 1], past)
        both_T = together(stem, left, right)
    except RunError as error:
        return f"{step} fails: {error}"
    num_targets = len(TARGETS)
    return disagreement(what, expected, [both_T[:num_targets], both_T[num_targets : 2 * num_targets]], again)


def disagreement(
    what: str, expected: Sequence[FloatArray], measured: Sequence[FloatArray], again: FloatArray
) -> str | None:
    """How far `measured`, the scores of `what`, are from `expected`, the log-probabilities of two contexts. None where
    only rounding differs, and the contexts differ. `again` are the second context's, fed one token a step."""
    difference = max(float(np.abs(a - b).max()) for a, b in zip(expected, measured, strict=True))
    spread = float(np.abs(expected[0] - expected[1]).max())
    rounding = float(np.abs(expected[1] - again).max())
    if spread == 0:
        return f"{what} cannot be tried: the scores of two texts are equal, as if this device computed nothing"
    if difference <= max(TOLERANCE * spread, min(3 * rounding, MOST * spread)):
        return None
    return f"{what} score {difference:.2g} nats off, where another context makes {spread:.2g}"


logger = logging.getLogger(__name__)

ATTENDED_TOLERANCE = 0.05
"""Largest accepted error of attended values around 1: the wrong shader is off by 0.1 and more."""

NUM_HEADS = 1
HEAD_SIZE = 16
"""Small, because a software device compiles the shader of size 64 for minutes. The fault shows at every size."""

OpenGraph = Callable[[bytes], Any]
_FLOAT = 1
"""ONNX's element type."""

GROUPS = (2, 4, 8, 16)
"""Groups of rows that are tried. A single token is not: it has kernels of its own, for attention at least, and rounding
hides that in one short text of five (4 layers, int8 in blocks of 128)."""

GROUP_TEXTS = (2 * GROUPS[-1], 4 * GROUPS[-1])
"""Tokens of the texts that are cut into groups: of two, because one may hide a difference, and the second so long that
kernels show that take more rows than any group has. Of SmolLM2-135M's shape in int4 that takes 0.6 s of one thread."""

EXAMPLE = 8


def fitting_attention(
    chunk_size: int, device: Device, spec: DecoderSpec, open_graph: OpenGraph
) -> tuple[int, list[str]]:
    """The most tokens of a step on this device, and a note where that is less than `chunk_size`.

    WebGPU's provider attends to 32 tokens and more with a shader of its own, which exchanges keys between the lanes of
    a subgroup. On Mesa's software Vulkan all keys but the first few come out wrong, without an error
    (onnxruntime-ep-webgpu 0.4.0, Mesa 25). Shorter steps take another shader, which is right there.
    """
    if not is_attention_at_risk(chunk_size, device, spec) or attends_to_long_steps(open_graph):
        return chunk_size, []
    note = f"steps are cut to {SHORT_STEP} tokens: this {device.kind} device attends to longer ones wrongly"
    logger.warning("%s", note)
    return SHORT_STEP, [note]


def attends_to_long_steps(open_graph: OpenGraph) -> bool:
    """Whether the first tokens of a long step see what they see in a short one, as causal attention must."""
    session = open_graph(attention_graph(_FLOAT, NUM_HEADS, HEAD_SIZE))
    tokens = np.random.default_rng(0).standard_normal((3, 1, 2 * SHORT_STEP, NUM_HEADS * HEAD_SIZE), np.float32)
    long = _attend(session, tokens)
    short = _attend(session, tokens[:, :, :SHORT_STEP])
    return bool(np.ptp(short)) and bool(np.abs(long[:, :SHORT_STEP] - short).max() < ATTENDED_TOLERANCE)


def _attend(session: Any, tokens: FloatArray) -> FloatArray:
    length = tokens.shape[2]
    past = np.zeros((1, NUM_HEADS, 0, HEAD_SIZE), np.float32)
    arrays = (*tokens, past, past, np.array([length - 1], np.int32), np.array(length, np.int32))
    fed = dict(zip(INPUTS, map(np.ascontiguousarray, arrays), strict=True))
    return np.asarray(run_graph(session, fed, [OUTPUT], Device("cpu"))[OUTPUT].numpy())


def group_rows(runner: Runner, spec: DecoderSpec, device: Device, chunk_size: int, notes: list[str]) -> None:
    """Lets texts be cut only where a trial finds the same bits, if the model's roundings would show others."""
    if not spec.rounds_rows or device.kind != "cpu" or spec.alone or chunk_size == 1:
        return
    if spec.states:  # they stand for what fills a group up, too
        notes.append("with states no groups of rows are made: what shares steps with a text may move its roundings")
        return
    group = find_row_group(runner, spec.num_ids)
    if group is not None:
        runner.traits = replace(runner.traits, row_group=group)
        return
    notes.append("requests are fed whole and alone: this processor's kernels round no groups of rows as a whole text's")
    runner.traits = runner.traits.one_by_one()


def find_row_group(runner: Runner, vocab_size: int) -> int | None:
    """The fewest tokens by which a text may be cut without changing a bit; None where no such number is found."""
    rng, lengths = np.random.default_rng(0), [min(length, runner.traits.context_length) for length in GROUP_TEXTS]
    texts = [rng.integers(0, vocab_size, length).tolist() for length in lengths]
    runner.reserve(max(lengths))
    try:
        for group in GROUPS:
            if all(_is_cut_by(runner, text, group) for text in texts):
                return group
    except RunError as error:
        logger.warning("no group of rows could be tried: %s", error)
    return None


def _is_cut_by(runner: Runner, text: list[int], group: int) -> bool:
    """Whether the end of `text` has the same bits after steps of groups as in one step; False where it has no end."""
    length = len(text) - len(text) % group
    if length <= group:
        return False
    stops = sorted({*range(group, min(GROUPS[-1], length) + 1, group), length - group, length})
    return _last_rows(runner, text, stops, group) == _last_rows(runner, text, [length], group)


def _last_rows(runner: Runner, text: list[int], stops: Sequence[int], num_rows: int) -> bytes:
    """The bits of what follows each of the last `num_rows` tokens of `text`, fed in steps up to each of `stops`. Only
    equal numbers of rows can be compared, because the scoring head's last bits depend on how many it takes."""
    source = None
    if (encoder := runner.encoder) is not None:
        shape = [size if isinstance(size, int) else EXAMPLE for size in encoder.source.shape[1:]]
        source = Source(np.zeros(shape, np.float32 if encoder.kind is SourceKind.FEATURES else np.int64))
    starts = [0, *stops[:-1]]
    rows = [Row(0, start, tuple(text[start:stop]), source=source) for start, stop in zip(starts, stops, strict=True)]
    for row in rows[:-1]:
        runner.run(Step((row,)))
    first = len(rows[-1].tokens) - num_rows
    logits_rows = tuple(LogitsRow(0, first + place) for place in range(num_rows))
    return runner.run(Step((rows[-1],), logits_rows, samples=tuple(range(num_rows)))).sample_logits_KV.tobytes()


LENGTH = 128
"""Tokens of a text, at most, where nothing in the graph asks for more; a trial takes some six times as many."""

WORK = 5 * 10**10
"""Bytes of weights times tokens of a text that the trial may take where the graph has numbers of positions that could
decide something: 92 tokens of SmolLM2-135M's shape in fp32 (1 s), 4,096 of a model of 12 MB; half as many where it has
none. Longer texts are fed by `olive-ext check --verify`."""

LEAST = 32
"""Tokens that every model may take."""

SHORT = 9
"""By how many tokens texts pass a number of positions."""

MOST_ROWS = 16
"""Rows of the step in which a text has company: kernels, and others' runtimes, take more rows than a few otherwise."""


def affordable(num_bytes: int | None) -> int:
    """The most tokens of a text, of a model of so many bytes."""
    return max(LEAST, WORK // max(1, num_bytes or WORK))


def cuts(length: int, group: int = 1) -> list[int]:
    """Where a text of so many tokens is cut: after each of its first eight, after powers of two, after a number that is
    drawn between two of them, and one token after each of these. Where steps are groups of tokens, after whole ones."""
    rng, powers = np.random.default_rng(0), [2**power for power in range(3, (length - 1).bit_length())]
    marks = [*powers, *(int(rng.integers(power, 2 * power)) for power in powers)]
    places = {place - place % group for place in (*range(1, 9), *marks, *(place + 1 for place in marks))}
    return sorted(place for place in places if 0 < place < length)


def tried_lengths(traits: Traits, longest: int, numbers: Sequence[int], most: int) -> list[int]:
    """Tokens of the longest text that is tried on each side of `traits.lengths`."""
    top = min(longest, traits.context_length - 1)
    base = min(top, LENGTH, max(LEAST, most // 2))
    passing = [4 * (number + SHORT) // 3 for number in (*numbers, *traits.lengths)]
    wanted = {base, *(size for size in passing if size <= most), *(min(base, length) for length in traits.lengths)}
    whole = {min(length, top) - min(length, top) % traits.row_group for length in wanted}
    return [*{traits.side(length).first: length for length in sorted(whole) if length > 3}.values()]


def check_steps(
    runner: Runner, vocab_size: int, longest: int, numbers: Sequence[int], most: int, *, is_step_scaled: bool = False
) -> str | None:
    """Why texts of this model must be fed whole and alone; None where that makes no difference, or cannot be tried:
    where a step takes less than a text, or an encoder would have to run. Where texts are fed so anyway, answers still
    continue token by token, and that alone is tried.

    Texts pass those of `numbers`, positions that the graph may compare with, that leave them below `most` tokens; a
    step has up to `longest`. They are tried on each side of the lengths after which texts are computed otherwise.
    `is_step_scaled`: whether all tokens of a step are rounded with one scale. Then a beginning that is fed as a whole
    text is rounded otherwise, by up to a third of what another context makes, and only single tokens are tried.
    """
    traits = runner.traits
    if min(longest, traits.context_length - 1) <= 2 * SHORT or runner.encoder is not None:
        return None
    try:
        for length in tried_lengths(traits, longest, numbers, most):
            trial = _PartsTrial(runner, vocab_size, length)
            expected = [trial.whole(text) for text in trial.texts]
            alone = [*trial.tokens_alone(with_beginnings=not is_step_scaled)]
            again = expected[1].copy()
            for _, _, (places, logprobs) in alone:
                again[places] = logprobs
            for what, index, (places, logprobs) in chain(trial.other_ways() if traits.chunked_prefill else (), alone):
                altered = [text.copy() for text in expected]
                altered[index][places] = logprobs
                if problem := disagreement(what, expected, altered, again):
                    return problem
    except RunError as error:
        return f"steps of parts of a text fail: {error}"
    return None


_Found = tuple[list[int], FloatArray]
"""Indices of places, and `TARGETS` at these."""


class _PartsTrial:
    """Two texts with a common first half, and the log-probabilities [P, T] of `TARGETS` at P places of each."""

    def __init__(self, runner: Runner, vocab_size: int, length: int) -> None:
        self._runner = runner
        rng, group = np.random.default_rng(0), runner.traits.row_group
        first, second = rng.integers(0, vocab_size, (2, length)).tolist()
        self._half = length // 2 - length // 2 % group
        self.texts: tuple[Text, Text] = (tuple(first), (*first[: self._half], *second[self._half :]))
        self._cuts = cuts(length, group)
        self._places = sorted({*self._cuts, *(cut - 1 for cut in self._cuts), length - 1})
        self._side = runner.traits.side(length).first
        runner.reserve(length)

    def whole(self, text: Text) -> FloatArray:
        return self._fed(text, 0, len(text))[1]

    def tokens_alone(self, *, with_beginnings: bool) -> Iterator[tuple[str, int, _Found]]:
        """As `other_ways`: the second text's last token, the text having been fed last, in a step of its own; and a few
        of its beginnings, fed whole, if these are wanted, and the token after each."""
        text, last = self.texts[1], len(self.texts[1]) - 1
        if not self._runner.traits.can_rewind:
            self._fed(text, 0, last)
        yield f"token {last + 1} of a text, fed alone,", 1, self._fed(text, last, last + 1)
        for length in self._cuts:
            if length & (length - 1) == 0:
                beginning = self._fed(text, 0, length)
                if with_beginnings:
                    yield f"the first {length} tokens of a text, fed as a whole one,", 1, beginning
                yield f"token {length + 1} of a text, fed alone,", 1, self._fed(text, length, length + 1)

    def other_ways(self) -> Iterator[tuple[str, int, _Found]]:
        """Ways of feeding one of the texts, by name; which one, and its results."""
        traits, num_slots = self._runner.traits, self._runner.capacity.num_slots
        (first, second), half, length = self.texts, self._half, len(self.texts[0])
        for begin, end in pairwise([0, *self._cuts, length]):
            yield f"texts fed in parts, up to token {end},", 0, self._fed(first, begin, end)
        if traits.can_rewind:
            yield "texts after the beginning of another", 1, self._fed(second, half, length)
        if traits.can_rewind and num_slots > 1:
            copied = self._fed(second, half, length, slot=1, copies=(Copy(0, 1, half),))
            yield "texts after a copy of another's beginning", 1, copied
        if num_slots > 1 and traits.form.mixes_pasts:
            self._fed(first, half if traits.can_rewind else 0, length - 1)
            early = len(self._places) // 4
            yield "texts beside others", 0, ([len(self._places) - 1, early], self._in_company(self._places[early]))

    def _in_company(self, early: int) -> FloatArray:
        """The results of the first text's last token, resident up to there, and of an early one, in the first and the
        last row of up to `MOST_ROWS`; some rows between them are idle."""
        text, traits, num_slots = self.texts[0], self._runner.traits, self._runner.capacity.num_slots
        last, blocks = min(MOST_ROWS, num_slots) - 1, self._runner.capacity.blocks
        if blocks.number:  # each row needs one at least
            last = max(1, min(last, (blocks.number - -(-len(text) // blocks.size)) // (early // blocks.size + 1)))
        begun = {*range(1, min(3, last)), last}
        for slot in sorted(begun):
            for begin, end in pairwise(sorted({0, early // 2 * traits.can_rewind, early})):
                self._fed(text, begin, end, slot=slot)
        pasts = {0: len(text) - 1, **dict.fromkeys(begun, early)}
        slots = traits.form.slots_of([*range(last + 1)], num_slots)
        rows = tuple(Row(slot, past := pasts.get(slot, 0), text[past : past + 1]) for slot in slots)
        return self._run(Step(rows, (LogitsRow(0, 0), LogitsRow(last, 0)), targets_of(2)))

    def _fed(self, text: Text, start: int, stop: int, *, slot: int = 0, copies: tuple[Copy, ...] = ()) -> _Found:
        """Of a step with more targets than shapes are run with beforehand, in several that read other places."""
        indices = [index for index, place in enumerate(self._places) if start <= place < stop]
        most = max(stop - start, FEW_READS) // len(TARGETS)
        logprobs = []
        for begin in range(0, max(1, len(indices)), most):
            logits_rows = tuple(LogitsRow(0, self._places[at] - start) for at in indices[begin : begin + most])
            rows, targets = (Row(slot, start, text[start:stop]),), targets_of(len(logits_rows))
            logprobs.append(self._run(Step(rows, logits_rows, targets, copies=copies)))
        return indices, np.concatenate(logprobs)

    def _run(self, step: Step) -> FloatArray:
        logprobs = self._runner.run(replace(step, whole_length=self._side)).target_logprobs
        values: FloatArray = logprobs[: len(step.targets)].reshape(-1, len(TARGETS))
        return values
