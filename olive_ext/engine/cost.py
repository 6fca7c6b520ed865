"""What a step costs on the opened model, measured, and what follows for the steps of a plan.

A step of S tokens that attend to T cells takes `fixed + per_token S + per_pair S T` seconds: hidden cells cost as much
as seen ones. Knows no graph and no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from olive_ext.engine.step import TRUNK, HeadRow, Row, Runner, Step
from olive_ext.engine.trunk import FIRST_CELL

SIZES = (64, 128, 256, 512)
"""Tokens of a step among which the best is chosen."""

SHAPES = ((8, 72), (64, 72), (64, 320))
"""Tokens and cells of the steps that are timed."""

REPEATS = 3
MIN_CONTEXT = max(cells for _, cells in SHAPES)
MIN_TOKENS = 20 * REPEATS * sum(tokens for tokens, _ in SHAPES)
"""Tokens to be fed from which on measuring pays: it costs a twentieth of them."""


@dataclass(frozen=True)
class StepCost:
    """Seconds: of any step, of each token, of each pair of token and cell."""

    fixed: float
    per_token: float
    per_pair: float

    def of(self, tokens: float, cells: float) -> float:
        """Seconds of a step of `tokens` behind and among `cells`."""
        return self.fixed + self.per_token * tokens + self.per_pair * tokens * cells

    def of_rows(self, parts: Iterable[tuple[int, int]]) -> float:
        """Seconds of one step for each part: its tokens, and those resident before it."""
        return sum(self.of(tokens, past + tokens) for tokens, past in parts)

    def of_branches(self, parts: Iterable[tuple[int, int]], size: int) -> float:
        """Seconds of the same parts in steps of `size` tokens, each part's share of them."""
        return sum(self.of(size, past + size) * tokens / size for tokens, past in parts)


@dataclass(frozen=True)
class Choice:
    """Tokens of a step of branches, or 0 for one sequence a step; and why."""

    size: int
    reason: str


def choose(cost: StepCost, parts: list[tuple[int, int]]) -> Choice:
    """The cheapest form of steps for a plan whose parts are (tokens to feed, tokens resident before)."""
    rows = cost.of_rows(parts)
    branches = {size: cost.of_branches(parts, size) for size in SIZES}
    size = min(branches, key=lambda size: branches[size])
    reason = f"measured: {branches[size]:.3g} s expected in steps of {size} tokens, {rows:.3g} s one by one"
    return Choice(size if branches[size] < rows else 0, reason)


def measure(runner: Runner, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Times steps of the trunk; the best of a few each, behind one that is not counted."""
    runner.reserve_trunk(FIRST_CELL + MIN_CONTEXT)
    seconds = [min([_timed(runner, tokens, cells, clock) for _ in range(REPEATS)][1:]) for tokens, cells in SHAPES]
    factors = [[1, tokens, tokens * cells] for tokens, cells in SHAPES]
    return StepCost(*np.maximum(np.linalg.solve(np.array(factors, float), seconds), 0).tolist())


def _timed(runner: Runner, tokens: int, cells: int, clock: Callable[[], float]) -> float:
    past = cells - tokens - FIRST_CELL
    row = Row(TRUNK, past, (0,) * tokens, cells_P=np.arange(FIRST_CELL, FIRST_CELL + past, dtype=np.int32))
    begin = clock()
    runner.run(Step((row,), heads=(HeadRow(0, tokens - 1),), first_cell=FIRST_CELL + past))
    return clock() - begin
