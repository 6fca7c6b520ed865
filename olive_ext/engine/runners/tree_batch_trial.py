"""Tries whether a device computes branches rightly: a small tree is scored as branches, and one row after the other."""

from __future__ import annotations

import numpy as np

from olive_ext.engine.runners.trials import disagreement
from olive_ext.engine.scheduling.shared_prefix import FIRST_CELL
from olive_ext.engine.step import SHARED_PREFIX, CellArray, FloatArray, LogitsRow, Row, Runner, Step
from olive_ext.errors import RunError

STEM, SUFFIX = 5, 4
"""Tokens of the tree's stem, and of each of its two branches."""

TARGETS = (0, 1, 2, 3)
"""Tokens whose log-probabilities are compared, behind each branch."""


def check_tree_batches(runner: Runner, vocab_size: int) -> str | None:
    """Why branches must not be used on this model and device; None where they are right."""
    rng = np.random.default_rng(0)
    stem, left, right = (tuple(rng.integers(0, vocab_size, length).tolist()) for length in (STEM, SUFFIX, SUFFIX))
    runner.reserve(STEM + SUFFIX)
    runner.reserve_shared_prefix(FIRST_CELL + STEM + 2 * SUFFIX)
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
    """The stem with one branch in a first step, then a branch behind the stem beside one that goes on."""
    left, right = suffixes
    stem_cells = np.arange(FIRST_CELL, FIRST_CELL + STEM, dtype=np.int32)
    first = FIRST_CELL + STEM + 2
    runner.run(Step((Row(SHARED_PREFIX, 0, stem + left[:2], cells_P=stem_cells[:0]),), first_cell=FIRST_CELL))
    begun: CellArray = np.arange(FIRST_CELL, first, dtype=np.int32)
    rows = (Row(SHARED_PREFIX, STEM, right, cells_P=stem_cells), Row(SHARED_PREFIX, STEM + 2, left[2:], cells_P=begun))
    heads = (LogitsRow(1, SUFFIX - 3), LogitsRow(0, SUFFIX - 1))
    step = Step(rows, heads, first_cell=first)
    both = _score(runner, step)
    return [both[: len(TARGETS)], both[len(TARGETS) :]]


def _score(runner: Runner, step: Step) -> FloatArray:
    targets = tuple((head, token) for head in range(len(step.logits_rows)) for token in TARGETS)
    return runner.run(Step(step.rows, step.logits_rows, targets, first_cell=step.first_cell)).target_logprobs
