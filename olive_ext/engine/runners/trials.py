"""Tries on an opened model what its graph does not tell. Knows runners by their steps only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from olive_ext.engine.runners.base import Runner
from olive_ext.engine.step import FIRST_CELL, SHARED_PREFIX, CellArray, FloatArray, LogitsRow, Row, Step
from olive_ext.errors import ModelError, RunError

TOLERANCE, MOST = 0.02, 0.3
"""Difference that passes, as a part of what another context makes for a difference: rounding is far below, a token that
sees wrong positions is far above. Where activations are rounded to few bits, three times the difference that feeding
the same tokens one by one makes, up to `MOST`."""


STEM, SUFFIX = 5, 4
"""Tokens of the tree's stem, and of each of its two ends."""

TARGETS = (0, 1, 2, 3)
"""Tokens whose log-probabilities are compared, behind each end."""


def fitting_chunk_size(chunk_size: int, runner: Runner, notes: list[str]) -> int:
    """`chunk_size`, or 1 and a note where the graph fails on several tokens behind resident positions.

    onnxruntime-genai's exports with MultiHeadAttention make their mask for a whole prompt or for one token only, and
    Mamba graphs that declare any number run with one.
    Raises `ModelError` where the model cannot run a token at all.
    """
    runner.reserve(3)
    try:
        runner.run(Step((Row(0, 0, (0,)),)))
    except RunError as error:
        raise ModelError(f"the model cannot run one token: {error}") from error
    if chunk_size == 1:
        return 1
    try:
        runner.run(Step((Row(0, 1, (0, 0)),)))
    except RunError as error:
        notes.append(f"steps are cut to 1 token, which is slow, because the graph takes no more behind a past: {error}")
        return 1
    return chunk_size


def disagreement(expected: Sequence[FloatArray], found: Sequence[FloatArray], again: FloatArray) -> str | None:
    """How far `found` is from `expected`, two contexts' log-probabilities; None where that is rounding. `again` is the
    second context's, fed one token a step."""
    difference = max(float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))
    spread = float(np.abs(expected[0] - expected[1]).max())
    rounding = float(np.abs(expected[1] - again).max())
    if difference <= max(TOLERANCE * spread, min(3 * rounding, MOST * spread)):
        return None
    return f"{difference:.2g} nats off, where another context makes {spread:.2g}"


def check_tree_batches(runner: Runner, vocab_size: int) -> str | None:
    """Why tree batches must not be used on this model and device; None where they score what single rows score."""
    rng = np.random.default_rng(0)
    stem, left, right = (tuple(rng.integers(0, vocab_size, length).tolist()) for length in (STEM, SUFFIX, SUFFIX))
    runner.reserve(STEM + SUFFIX, FIRST_CELL + STEM + 2 * SUFFIX)
    try:
        expected = [_alone(runner, stem + suffix) for suffix in (left, right)]
        again = _one_by_one(runner, stem + right)
        found = _as_tree_batch(runner, stem, left, right)
    except RunError as error:
        return f"a step of branches fails: {error}"
    problem = disagreement(expected, found, again)
    return None if problem is None else f"branches score {problem}"


def _alone(runner: Runner, tokens: tuple[int, ...]) -> FloatArray:
    return _score(runner, Step((Row(0, 0, tokens),), (LogitsRow(0, len(tokens) - 1),)))


def _one_by_one(runner: Runner, tokens: tuple[int, ...]) -> FloatArray:
    """The same from the stem on in steps of one token."""
    runner.run(Step((Row(0, 0, tokens[:STEM]),)))
    for past in range(STEM, len(tokens) - 1):
        runner.run(Step((Row(0, past, tokens[past : past + 1]),)))
    return _score(runner, Step((Row(0, len(tokens) - 1, tokens[-1:]),), (LogitsRow(0, 0),)))


def _as_tree_batch(runner: Runner, stem: tuple[int, ...], *suffixes: tuple[int, ...]) -> list[FloatArray]:
    """The stem with one end in a first step, then the other end behind the stem, together with what the first one
    goes on with."""
    left, right = suffixes
    stem_cells = np.arange(FIRST_CELL, FIRST_CELL + STEM, dtype=np.int32)
    first = FIRST_CELL + STEM + 2
    runner.run(Step((Row(SHARED_PREFIX, 0, stem + left[:2], cells_P=stem_cells[:0]),), first_cell=FIRST_CELL))
    begun: CellArray = np.arange(FIRST_CELL, first, dtype=np.int32)
    rows = (Row(SHARED_PREFIX, STEM, right, cells_P=stem_cells), Row(SHARED_PREFIX, STEM + 2, left[2:], cells_P=begun))
    logits_rows = (LogitsRow(1, SUFFIX - 3), LogitsRow(0, SUFFIX - 1))
    step = Step(rows, logits_rows, first_cell=first)
    both = _score(runner, step)
    return [both[: len(TARGETS)], both[len(TARGETS) :]]


def _score(runner: Runner, step: Step) -> FloatArray:
    targets = tuple((row, token) for row in range(len(step.logits_rows)) for token in TARGETS)
    return runner.run(Step(step.rows, step.logits_rows, targets, first_cell=step.first_cell)).target_logprobs
