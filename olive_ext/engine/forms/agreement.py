"""Whether two ways of feeding a few random texts agree: what a form is trusted with is tried before it is used. Knows
runners by their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import FloatArray, LogitsRow, Row, Step
from olive_ext.errors import RunError

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
