"""What a step costs, on the opened model, measured, or by a rule; and what follows for the steps of a plan.

A step of S tokens that attend to T cells takes `fixed + per_token S + per_pair S T` seconds: hidden cells cost as much
as seen ones. Knows no graph and no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from olive_ext.engine.runners.runner import Capacity, Traits
from olive_ext.engine.step import FIRST_CELL, SHARED_PREFIX, LogitsRow, Row, Step, StepOutput

SIZES = (64, 128, 256, 512)
"""Tokens of a step among which the best is chosen."""

SHAPES = ((8, 72), (64, 72), (64, 1088))
"""Tokens and cells of the steps that are timed; fewer cells where the context has fewer. The last one has many, so that
its pairs take long enough to be seen."""

REPEATS = 4
MIN_CONTEXT = 320
"""The least context length, in positions, at which steps of different numbers of cells differ measurably."""

MIN_TOKENS = 20 * REPEATS * sum(tokens for tokens, _ in SHAPES)
"""Tokens to be fed from which on measuring pays: it costs a twentieth of them."""

MARGIN = 0.95
"""Tree batches are taken where they cost less than this part of what one text a step costs: that has no cells to
move."""


class Target(Protocol):
    """What is timed: a runner, or one with a tap."""

    @property
    def traits(self) -> Traits: ...

    @property
    def capacity(self) -> Capacity: ...

    def reserve(self, positions: int, cells: int = 0) -> None: ...

    def run(self, step: Step) -> StepOutput: ...


@dataclass(frozen=True)
class StepCost:
    """Seconds: of any step, of each token, of each pair of token and cell."""

    fixed: float
    per_token: float
    per_pair: float

    def of(self, tokens: float, cells: float) -> float:
        """Seconds of a step of `tokens` behind and among `cells`."""
        return self.fixed + self.per_token * tokens + self.per_pair * tokens * cells

    def of_rows(self, parts: Iterable[tuple[int, int]], size: int) -> float:
        """Seconds of the parts, each (tokens to feed, tokens resident before), one by one in steps of `size`."""
        return sum(self._of_text(tokens, past, size) for tokens, past in parts)

    def of_tree_batches(self, parts: Iterable[tuple[int, int]], size: int) -> float:
        """Seconds of the same parts in steps of `size` tokens, each part's share of them. What does not fit goes on in
        the next step, behind its own beginning."""
        return sum(self.of(size, past + size + max(0, tokens - size) / 2) * tokens / size for tokens, past in parts)

    def _of_text(self, tokens: int, past: int, size: int) -> float:
        full, rest = divmod(tokens, size)
        whole = sum(self.of(size, past + size * number) for number in range(1, full + 1))
        return whole + (self.of(rest, past + tokens) if rest else 0.0)


TYPICAL = StepCost(fixed=16.0, per_token=1.0, per_pair=1 / 1600)
"""The rule: what steps cost on a CPU, in units of one token's cost. Measured for SmolLM2-135M's shape in fp32 on two
cores: fixed 10 to 19, each pair 1/2100 to 1/1200."""


@dataclass(frozen=True)
class Choice:
    """Tokens of a tree batch, or 0 for one sequence a step; and why."""

    size: int
    reason: str


def choose(cost: StepCost, parts: list[tuple[int, int]], row_size: int) -> Choice:
    """The cheapest form of steps for a plan whose parts are (tokens to feed, tokens resident before); a part alone is
    fed in steps of `row_size`. `cost` was measured or is `TYPICAL`."""
    origin, unit = ("by rule", "tokens' cost") if cost is TYPICAL else ("measured", "s")
    rows = cost.of_rows(parts, row_size)
    batches = {size: cost.of_tree_batches(parts, size) for size in SIZES}
    size = min(batches, key=lambda size: batches[size])
    reason = f"{origin}: {batches[size]:.3g} {unit} expected in steps of {size} tokens, {rows:.3g} {unit} one by one"
    return Choice(size if batches[size] < MARGIN * rows else 0, reason)


def measure(target: Target, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Times tree batches; the best of a few of each size, behind one that is not counted."""
    shapes = [(tokens, min(cells, target.traits.context_length)) for tokens, cells in SHAPES]
    target.reserve(0, FIRST_CELL + max(cells for _, cells in shapes))
    seconds = [min([_timed(target, tokens, cells, clock) for _ in range(REPEATS)][1:]) for tokens, cells in shapes]
    factors = [[1, tokens, tokens * cells] for tokens, cells in shapes]
    return StepCost(*np.maximum(np.linalg.solve(np.array(factors, float), seconds), 0).tolist())


def _timed(target: Target, tokens: int, cells: int, clock: Callable[[], float]) -> float:
    past = cells - tokens - FIRST_CELL
    row = Row(SHARED_PREFIX, past, (0,) * tokens, cells_P=np.arange(FIRST_CELL, FIRST_CELL + past, dtype=np.int32))
    begin = clock()
    target.run(Step((row,), logits_rows=(LogitsRow(0, tokens - 1),), first_cell=FIRST_CELL + past))
    return clock() - begin
