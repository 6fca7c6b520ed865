"""Log-probabilities that steps of an opened model give for a few random texts, and whether two ways of feeding these
agree. Knows runners by their steps, and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import FloatArray, LogitsRow, Row, Step
from olive_ext.errors import RunError

TOLERANCE, MOST = 0.02, 0.3
"""Difference that passes, as a part of what another context makes for a difference: rounding is far below, a token that
sees wrong positions is far above. Where activations are rounded to few bits, three times the difference that feeding
the same tokens one by one makes, up to `MOST`."""

TARGETS = (0, 1, 2, 3)
"""Tokens whose log-probabilities are compared, behind each text."""

STEM, SUFFIX = 5, 4
"""Tokens of a tree's stem, and of each of its two ends."""

Text = tuple[int, ...]


def draw(vocab_size: int) -> Callable[[int], Text]:
    """Gives random texts of given lengths, always the same ones."""
    rng = np.random.default_rng(0)
    return lambda length: tuple(rng.integers(0, vocab_size, length).tolist())


def targets_of(num_rows: int) -> tuple[tuple[int, int], ...]:
    """`TARGETS` behind each logits row of a step."""
    return tuple((row, token) for row in range(num_rows) for token in TARGETS)


def read_end(tokens: Text, past: int = 0) -> Step:
    """A step of `tokens`, of which `past` are resident, that reads `TARGETS` behind them."""
    return Step((Row(0, past, tokens[past:]),), (LogitsRow(0, len(tokens) - past - 1),), targets_of(1))


def score(runner: Runner, tokens: Text, past: int = 0) -> FloatArray:
    """Log-probabilities [T] of `TARGETS` behind `tokens`, of which `past` are resident; in nats."""
    return runner.run(read_end(tokens, past)).target_logprobs[: len(TARGETS)]


def score_one_by_one(runner: Runner, tokens: Text, first: int) -> FloatArray:
    """As `score` [T], with the first `first` tokens in one step and each later one in a step of its own."""
    logprobs_T = score(runner, tokens[:first])
    for past in range(first, len(tokens)):
        logprobs_T = score(runner, tokens[: past + 1], past)
    return logprobs_T


Together = Callable[[Text, Text, Text], FloatArray]
"""Runs steps on a stem and two ends behind it: the log-probabilities [2 T] behind both ends."""


def two_ends_problem(
    runner: Runner, vocab_size: int, step: str, what: str, together: Together, cells: int = 0
) -> str | None:
    """Why steps, `what` such as a `step`, must not be used; None where they score what single rows score."""
    stem, left, right = map(draw(vocab_size), (STEM, SUFFIX, SUFFIX))
    runner.reserve(STEM + SUFFIX, cells)
    try:
        expected = [score(runner, stem + end) for end in (left, right)]
        again = score_one_by_one(runner, stem + right, STEM)
        both_T = together(stem, left, right)
    except RunError as error:
        return f"{step} fails: {error}"
    num_targets = len(TARGETS)
    return disagreement(what, expected, [both_T[:num_targets], both_T[num_targets : 2 * num_targets]], again)


def disagreement(
    what: str, expected: Sequence[FloatArray], given: Sequence[FloatArray], again: FloatArray
) -> str | None:
    """How far `given`, which `what` score, is from `expected`, two contexts' log-probabilities; None where that is
    rounding, and the contexts differ. `again` is the second context's, fed one token a step."""
    difference = max(float(np.abs(a - b).max()) for a, b in zip(expected, given, strict=True))
    spread = float(np.abs(expected[0] - expected[1]).max())
    rounding = float(np.abs(expected[1] - again).max())
    if spread == 0:
        return f"{what} cannot be tried: the scores of two texts are equal, as if this device computed nothing"
    if difference <= max(TOLERANCE * spread, min(3 * rounding, MOST * spread)):
        return None
    return f"{what} score {difference:.2g} nats off, where another context makes {spread:.2g}"
