"""Finds out by steps on an opened model which rows of a cache that the graph returns may share a step, and where a text
may be cut so that no bit changes.

What an exporter's graph does with several rows does not show on it: it may make its mask for one row, or take positions
from the past's shape. How many rows a kernel takes at a time is the processor's. Knows runners by their steps. Axes: S
tokens of a text, T targets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from olive_ext.engine.requests import Source
from olive_ext.engine.runners.runner import Runner, Traits
from olive_ext.engine.runners.trials import TARGETS, disagreement
from olive_ext.engine.step import ALONE, Batching, FloatArray, LogitsRow, Row, RowMix, Step
from olive_ext.errors import RunError
from olive_ext.model.types import DecoderSpec, Device, SourceKind

logger = logging.getLogger(__name__)

TEXT_TOKENS = 5
PROMPT = 3
"""Tokens of the two texts, and of the part that is fed first."""

GROUPS = (2, 4, 8, 16)
"""Groups of rows that are tried. A single token is not: it has kernels of its own, for attention at least, and rounding
hides that in one short text of five (4 layers, int8 in blocks of 128)."""

GROUP_TEXTS = (2 * GROUPS[-1], 4 * GROUPS[-1])
"""Tokens of the texts that are cut into groups: of two, because one may hide a difference, and the second so long that
kernels show that take more rows than any group has. Of SmolLM2-135M's shape in int4 that takes 0.6 s of one thread."""

EXAMPLE = 8

Texts = tuple[tuple[int, ...], tuple[int, ...]]


def find_row_mix(
    runner: Runner, vocab_size: int, chunk_size: int, pad_in_front: Callable[[bool], None]
) -> RowMix | None:
    """How far rows of one step must be alike, and None where they give other numbers together than alone. Rows with
    fewer positions than others are filled up behind or, after `pad_in_front(True)`, in front, which stays set."""
    rng = np.random.default_rng(0)
    first, second = (tuple(text) for text in rng.integers(0, vocab_size, (2, TEXT_TOKENS)).tolist())
    trial = _Trial(runner, (first, second), chunk_size)
    mix = RowMix(prompts=trial.agrees(trial.prompts_together))
    if trial.agrees(trial.decoded_behind_different_pasts):  # as GroupQueryAttention does, which refuses `continued`
        return replace(mix, pasts=True)
    pad_in_front(True)
    mix = replace(mix, pasts=trial.agrees(trial.decoded_behind_different_pasts))
    if not mix.pasts:
        pad_in_front(False)
        if not trial.agrees(trial.decoded_behind_equal_pasts):
            return None
    return replace(mix, continued=trial.agrees(trial.texts_continued_together))


def group_rows(runner: Runner, spec: DecoderSpec, device: Device, chunk_size: int, notes: list[str]) -> None:
    """Lets texts be cut only where a trial finds the same bits, if the model's roundings would show others. Steps of
    one token need no trial: a text is the same however it is cut."""
    if not spec.rounds_rows or device.kind != "cpu" or not spec.is_splittable or chunk_size == 1:
        return
    if spec.states:  # they stand for what fills a group up, too
        notes.append("with states no groups of rows are made: what shares steps with a text may move its roundings")
        return
    group = find_row_group(runner, spec.vocab_size)
    if group is not None:
        runner.traits = replace(runner.traits, row_group=group)
        return
    notes.append("requests are fed whole and alone: this processor's kernels round no groups of rows as a whole text's")
    runner.traits = replace(
        runner.traits, batching=Batching.SINGLE, row_mix=ALONE, chunked_prefill=False, tree_batches=False
    )


def find_row_group(runner: Runner, vocab_size: int) -> int | None:
    """The fewest tokens by which a text may be cut, so that steps of a multiple of so many find the very bits of one
    step of the whole text; None where no such number is found."""
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
    """Whether the end of `text` has the same bits behind steps of groups as in one step; False where it has no end."""
    length = len(text) - len(text) % group
    if length <= group:
        return False
    stops = sorted({*range(group, min(GROUPS[-1], length) + 1, group), length - group, length})
    return _last_rows(runner, text, stops, group) == _last_rows(runner, text, [length], group)


def _example_source(traits: Traits) -> Source | None:
    """Zeros for the encoder, if there is one: `EXAMPLE` of what has no fixed size."""
    if traits.source is None:
        return None
    shape = [size if isinstance(size, int) else EXAMPLE for size in traits.source.shape[1:]]
    return Source(np.zeros(shape, np.float32 if traits.source_kind is SourceKind.FEATURES else np.int64))


def _last_rows(runner: Runner, text: list[int], stops: Sequence[int], num_rows: int) -> bytes:
    """The bits of what follows each of the last `num_rows` tokens of `text`, fed in steps up to each of `stops`. Only
    equal numbers of rows can be compared, because the scoring head's last bits depend on how many it takes."""
    source = _example_source(runner.traits)
    starts = [0, *stops[:-1]]
    rows = [Row(0, start, tuple(text[start:stop]), source=source) for start, stop in zip(starts, stops, strict=True)]
    for row in rows[:-1]:
        runner.run(Step((row,)))
    first = len(rows[-1].tokens) - num_rows
    logits_rows = tuple(LogitsRow(0, first + place) for place in range(num_rows))
    return runner.run(Step((rows[-1],), logits_rows, samples=tuple(range(num_rows)))).sample_logits_KV.tobytes()


class _Trial:
    """Two texts in two slots, and the log-probabilities of `TARGETS` behind each of their tokens when fed alone."""

    def __init__(self, runner: Runner, texts: Texts, chunk_size: int) -> None:
        self._runner = runner
        self._texts = texts
        self._chunk_size = chunk_size
        runner.reserve(TEXT_TOKENS)
        self._expected = [self._alone(0, text) for text in texts]

    def agrees(self, feed: Callable[[], list[tuple[int, int, FloatArray]]]) -> bool:
        """Whether what `feed` finds, (text, its tokens so far, log-probabilities [T]), is what is found alone."""
        try:
            found = feed()
        except RunError:
            return False
        pairs = [(self._expected[text][length - 1], logprobs_T) for text, length, logprobs_T in found]
        wanted, seen = (np.concatenate(side) for side in zip(*pairs, strict=True))
        spread = [self._expected[0].ravel(), self._expected[1].ravel()]
        return disagreement("rows together", [*spread, wanted], [*spread, seen], spread[1]) is None

    def prompts_together(self) -> list[tuple[int, int, FloatArray]]:
        self._check(PROMPT)
        return self._together((0, PROMPT), (0, PROMPT))

    def texts_continued_together(self) -> list[tuple[int, int, FloatArray]]:
        self._check(TEXT_TOKENS - PROMPT)
        self._prompts(PROMPT, PROMPT)
        return self._together((PROMPT, TEXT_TOKENS), (PROMPT, TEXT_TOKENS))

    def decoded_behind_different_pasts(self) -> list[tuple[int, int, FloatArray]]:
        self._prompts(PROMPT, PROMPT - 1)
        return [*self._together((3, 4), (2, 3)), *self._together((4, 5), (3, 4))]

    def decoded_behind_equal_pasts(self) -> list[tuple[int, int, FloatArray]]:
        self._prompts(PROMPT, PROMPT)
        return [*self._together((3, 4), (3, 4)), *self._together((4, 5), (4, 5))]

    def _check(self, num_tokens: int) -> None:
        if num_tokens > self._chunk_size:
            raise RunError(f"the graph takes {self._chunk_size} tokens at once")

    def _prompts(self, *lengths: int) -> None:
        """Each text's first tokens, alone in the slot of its number."""
        for slot, (text, length) in enumerate(zip(self._texts, lengths, strict=True)):
            self._alone(slot, text[:length])

    def _alone(self, slot: int, tokens: Sequence[int]) -> FloatArray:
        """[S, T]."""
        found = []
        for start in range(0, len(tokens), self._chunk_size):
            row = Row(slot, start, tuple(tokens[start : start + self._chunk_size]))
            found.append(self._run((row,), [LogitsRow(0, offset) for offset in range(len(row.tokens))]))
        return np.concatenate(found)

    def _together(self, *spans: tuple[int, int]) -> list[tuple[int, int, FloatArray]]:
        """One step with a part of each text, from and up to so many tokens."""
        rows = tuple(Row(slot, start, self._texts[slot][start:stop]) for slot, (start, stop) in enumerate(spans))
        found_RT = self._run(rows, [LogitsRow(slot, len(row.tokens) - 1) for slot, row in enumerate(rows)])
        return [(slot, stop, found_RT[slot]) for slot, (_, stop) in enumerate(spans)]

    def _run(self, rows: tuple[Row, ...], logits_rows: Sequence[LogitsRow]) -> FloatArray:
        """[R, T]."""
        targets = tuple((place, token) for place in range(len(logits_rows)) for token in TARGETS)
        output = self._runner.run(Step(rows, tuple(logits_rows), targets))
        return output.target_logprobs.reshape(len(logits_rows), len(TARGETS))
