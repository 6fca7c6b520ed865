"""Whether a text's numbers are its own: fed whole and alone, in parts, behind what another text has left, and beside
another text. What no reading of a graph shows, a few random texts do. Knows runners by their steps, and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.runners.trials import TARGETS, disagreement
from olive_ext.engine.step import Batching, Copy, FloatArray, LogitsRow, Row, Step
from olive_ext.errors import RunError

LENGTH = 32
"""Tokens of the texts where nothing in the graph asks for more; the whole trial takes five times as many."""

WORK = 5 * 10**10
"""Bytes of weights times tokens of a text that the trial may take where the graph has numbers of positions that could
decide something: 92 tokens of SmolLM2-135M's shape in fp32 (1 s), 4,096 of a model of 12 MB. Longer texts are fed by
`olive-ext check --verify`."""

SHORT = 9
"""Tokens of the text that another one is fed beside, and by how many texts pass a number of positions."""

Text = tuple[int, ...]


def affordable(num_bytes: int | None) -> int:
    """The most tokens of a text, of a model of so many bytes."""
    return max(LENGTH, WORK // max(1, num_bytes or WORK))


def check_steps(runner: Runner, vocab_size: int, longest: int, numbers: Sequence[int], most: int) -> str | None:
    """Why texts of this model must be fed whole and alone; None where that makes no difference, or cannot be tried:
    where a step takes less than a text, or an encoder would have to run.

    Texts pass those of `numbers`, positions that the graph may compare with, that leave them below `most` tokens; a
    step has up to `longest`.
    """
    wanted = [4 * (number + SHORT) // 3 for number in numbers]  # the last of four parts begins behind the number
    length = max([LENGTH, *(tokens for tokens in wanted if tokens <= most)])
    length = min(length, longest, runner.traits.context_length - 1)
    length -= length % (4 * runner.traits.row_group)
    traits = runner.traits
    if length <= 2 * SHORT or traits.source_kind is not None or not traits.chunked_prefill:
        return None
    trial = _Trial(runner, vocab_size, length)
    try:
        expected = [trial.whole(text) for text in trial.texts]
        if (expected[0] == expected[1]).all():  # the device computes nothing, which other trials are for
            return None
        again = np.concatenate([expected[1][: -len(TARGETS)], trial.last_alone()])
        for what, found in trial.other_ways(expected):
            if problem := disagreement(what, expected, found, again):
                return problem
    except RunError as error:
        return f"steps of parts of a text fail: {error}"
    return None


class _Trial:
    """Two texts with a common first half, and the log-probabilities of `TARGETS` at two places of their second."""

    def __init__(self, runner: Runner, vocab_size: int, length: int) -> None:
        self._runner = runner
        rng = np.random.default_rng(0)
        first, second = rng.integers(0, vocab_size, (2, length)).tolist()
        self._part = length // 4
        self.texts: tuple[Text, Text] = (tuple(first), (*first[: 2 * self._part], *second[2 * self._part :]))
        self._places = (3 * self._part - 1, length - 1)
        self._short: Text = tuple(second[:SHORT])
        self._side = runner.traits.side(length).first
        runner.reserve(length)

    def whole(self, text: Text) -> FloatArray:
        return self._fed(text, 0, len(text))

    def last_alone(self) -> FloatArray:
        """Of the last token of the second text, which was fed last, in a step of its own."""
        text = self.texts[1]
        if not self._runner.traits.can_rewind:
            self._fed(text, 0, len(text) - 1)
        return self._fed(text, len(text) - 1, len(text))

    def other_ways(self, expected: list[FloatArray]) -> Iterator[tuple[str, list[FloatArray]]]:
        """What ways of feeding one of the texts give of it, and what is expected of the other."""
        traits, num_slots = self._runner.traits, self._runner.capacity.num_slots
        (first, second), half, length = self.texts, 2 * self._part, len(self.texts[0])
        begins = range(0, length, self._part)
        parts = np.concatenate([self._fed(first, begin, begin + self._part) for begin in begins])
        yield "texts fed in parts", [parts, expected[1]]
        if traits.can_rewind:
            yield "texts behind the beginning of another", [expected[0], self._fed(second, half, length)]
        if traits.can_rewind and num_slots > 1:
            copied = self._fed(second, half, length, slot=1, copies=(Copy(0, 1, half),))
            yield "texts behind a copy of another's beginning", [expected[0], copied]
        is_alike = traits.batching is Batching.ALIKE
        if num_slots > 1 and (traits.row_mix.pasts if is_alike else traits.batching is not Batching.SINGLE):
            self._fed(first, half if traits.can_rewind else 0, length - 1)
            beside = np.concatenate([expected[0][: -len(TARGETS)], self._last_in_company()])
            yield "texts beside another", [beside, expected[1]]

    def _last_in_company(self) -> FloatArray:
        """Of the last token of the first text, which is resident up to there, in a step with that of the short one."""
        text, short, last = self.texts[0], self._short, len(self.texts[0]) - 1
        self._fed(short, 0, SHORT - 1, slot=1)
        is_pool = self._runner.traits.batching is Batching.POOL
        idle = [Row(slot, 0, (0,)) for slot in range(2, self._runner.capacity.num_slots if is_pool else 2)]
        rows = (Row(0, last, text[last:]), Row(1, SHORT - 1, short[-1:]), *idle)
        return self._run(Step(rows, (LogitsRow(0, 0),), tuple((0, token) for token in TARGETS)))

    def _fed(self, text: Text, start: int, stop: int, *, slot: int = 0, copies: tuple[Copy, ...] = ()) -> FloatArray:
        """The log-probabilities at the places of `text[start:stop]`, fed behind what is resident."""
        offsets = [place - start for place in self._places if start <= place < stop]
        logits_rows = tuple(LogitsRow(0, offset) for offset in offsets)
        targets = tuple((row, token) for row in range(len(offsets)) for token in TARGETS)
        return self._run(Step((Row(slot, start, text[start:stop]),), logits_rows, targets, copies=copies))

    def _run(self, step: Step) -> FloatArray:
        found = self._runner.run(replace(step, whole_length=self._side)).target_logprobs
        return found[: len(step.targets)]
