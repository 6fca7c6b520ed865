"""Finds out which rows of a cache that the graph returns may share a step, by steps on an opened model.

What an exporter's graph does with several rows does not show on it: it may make its mask for one row, or take positions
from the past's shape. Knows runners by their steps. Axes: S tokens of a text, T targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.runners.trials import TARGETS, disagreement
from olive_ext.engine.step import FloatArray, LogitsRow, Row, RowMix, Step
from olive_ext.errors import RunError

TEXT_TOKENS = 5
PROMPT = 3
"""Tokens of the two texts, and of the part that is fed first."""

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
