"""Tree batches: which rows of scored texts the next step holds, and where their common prefix lies in the cache.

The shared-prefix cache is one path of tokens, each in a cell. Knows no runner; the scheduler takes in the results.

path     A B C D      after a step with the rows "A B x y" and "A B C D"
cells    1 2 5 6      (x and y lie in 3 and 4)
settled  1 2 3 4      where the next sequence shares all four
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from olive_ext.engine.capacity import Capacity
from olive_ext.engine.forms.base import ReadySequences, ScoredBatch, ScoredSteps, ScoringRule, StepForm, StepTarget
from olive_ext.engine.media.items import border, chunk_end
from olive_ext.engine.requests import TokenArray, common_prefix
from olive_ext.engine.scheduling.chosen_rows import ChosenRows
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import FIRST_CELL, SHARED_PREFIX, CellArray, LogitsRow, Move, Row, Step
from olive_ext.model.decisions import DEFAULT_CHUNK

CELLS_PER_POSITION = 2
"""Cells of the shared-prefix cache at most, for each position of the context: rotary tables are made to cover them."""


@dataclass(frozen=True)
class TreeForm(StepForm):
    """Texts that are scored make tree batches; all others have slots."""

    slots: StepForm

    @property
    @override
    def name(self) -> str:  # type: ignore[override]
        return self.slots.name

    @property
    @override
    def in_slots(self) -> StepForm:
        return self.slots

    @override
    def over(self, slots: StepForm) -> StepForm:
        return TreeForm(slots)

    @override
    def next_rows(self, ready: ReadySequences) -> ChosenRows:
        return self.slots.next_rows(ready)

    @override
    def runs(self, other: StepForm) -> bool:
        return self.slots.runs(other)

    @override
    def scored_steps(self, chunk_size: int, rule: ScoringRule) -> ScoredSteps:
        return TreeSteps(chunk_size, rule)


class TreeBatches:
    """Waiting sequences in sorted order, of which the first may be computed in part."""

    def __init__(self, capacity: int, num_tokens: int) -> None:
        """`capacity`: cells of the shared-prefix cache. `num_tokens`: tokens of a step."""
        self._prefix = SharedPrefix(capacity)
        self._num_tokens = num_tokens
        self._waiting: deque[Sequence] = deque()

    @property
    def num_waiting(self) -> int:
        """Sequences that are not computed to their ends."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Takes sequences in sorted order."""
        self._waiting.append(sequence)

    def plan(self, limit: int) -> ScoredBatch:
        """Rows of up to `limit` tokens together, fewer where no more are waiting or an item would be cut, more where
        the first row begins with an item of more. The last row may end before its sequence does, which then stays the
        first that waits."""
        move = self._prefix.settle(_to_join(self._waiting[0]))
        first_cell = self._prefix.top
        room = min(limit, self._num_tokens, self._prefix.room)
        rows: list[tuple[Sequence, Row]] = []
        shared = []
        while room > 0 and self._waiting:
            sequence = self._waiting[0]
            is_new = not sequence.computed
            sequence.computed = self._prefix.join(_to_join(sequence))
            if is_new:
                shared.append(sequence.computed)
            stop = min(sequence.end, sequence.computed + room)
            if sequence.media and stop < sequence.end:
                stop = chunk_end(sequence.media, sequence.computed, stop)
            if rows and stop - sequence.computed > room:
                break
            tokens = sequence.tokens[sequence.computed : stop]
            fed, cells_P = tuple(tokens.tolist()), self._prefix.cells()
            row = Row(SHARED_PREFIX, sequence.computed, fed, media=sequence.media, cells_P=cells_P)
            self._prefix.extend(tokens)
            rows.append((sequence, row))
            room -= len(tokens)
            if stop < sequence.end:
                break
            self._waiting.popleft()
        return ScoredBatch(ChosenRows(rows), tuple(shared), (move,) if move else (), first_cell)


class SharedPrefix:
    """The tokens of the sequence that was fed last, and their cells. Sequences are to come in sorted order."""

    def __init__(self, capacity: int) -> None:
        self._tokens_P = np.zeros(capacity, np.int32)
        self._cells_P: CellArray = np.zeros(capacity, np.int32)
        self._length = 0
        self.top = FIRST_CELL
        """The cell of the next token."""

    @property
    def room(self) -> int:
        """Cells that are left."""
        return len(self._cells_P) - self.top

    def settle(self, tokens: TokenArray) -> Move | None:
        """Forgets all but what `tokens` shares with the path, and puts that into the first cells."""
        length = self.join(tokens)
        settled = np.arange(FIRST_CELL, FIRST_CELL + length, dtype=np.int32)
        stays = common_prefix(self._cells_P[:length], settled)
        move = Move(self._cells_P[stays:length].copy(), FIRST_CELL + stays) if stays < length else None
        self._cells_P[:length] = settled
        self.top = FIRST_CELL + length
        return move

    def join(self, tokens: TokenArray) -> int:
        """Cuts the path back to what it shares with `tokens`: the number of tokens."""
        self._length = common_prefix(self._tokens_P[: self._length], tokens)
        return self._length

    def cells(self) -> CellArray:
        """The cell of each of the P tokens of the path; int32 [P]."""
        cells: CellArray = self._cells_P[: self._length].copy()
        return cells

    def extend(self, tokens: TokenArray) -> None:
        """Continues the path with `tokens`, in the next cells."""
        stop = self._length + len(tokens)
        self._tokens_P[self._length : stop] = tokens
        self._cells_P[self._length : stop] = np.arange(self.top, self.top + len(tokens))
        self._length = stop
        self.top += len(tokens)


def _to_join(sequence: Sequence) -> TokenArray:
    """Tokens that need not be fed where they are resident: those computed, or those before the first score."""
    return sequence.tokens[: sequence.computed or border(sequence.media, sequence.first_read())]


SIZES = (64, 128, 256, 512)
"""Tokens of a step among which the best is chosen."""

DEFAULT_SIZE = 256
"""Tokens of a tree batch until there has been enough work to measure."""

SHAPES = ((8, 72), (64, 72), (64, 1088))
"""Tokens and cells of the steps that are timed; fewer cells where the context has fewer. The last one has many, so that
its pairs take long enough to be seen."""

MIN_CONTEXT = 320
"""The least context length, in positions, at which steps of different numbers of cells differ measurably."""

REPEATS = 4
"""Runs of each step that is timed; the first is not counted."""

MIN_TOKENS = 20 * REPEATS * sum(tokens for tokens, _ in SHAPES)
"""Tokens to be fed from which on measuring pays: it costs a twentieth of them."""

MARGIN = 0.95
"""Tree batches are taken where they cost less than this part of what one text a step costs: that has no cells to
move."""


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


class TreeSteps(ScoredSteps):
    """Tree batches of `num_tokens`, or one text a step (0), whichever is cheaper where the form is open."""

    def __init__(self, chunk_size: int, rule: ScoringRule) -> None:
        waiting = "not measured yet: too little work so far" if rule.is_measured else "by rule: nothing scored so far"
        super().__init__("branches", waiting if rule.is_open else rule.reason)
        self._is_open = rule.is_open
        self._cost = None if rule.is_measured else TYPICAL
        self.num_tokens = DEFAULT_SIZE if rule.is_open else chunk_size

    @override
    def choose(self, sequences: Iterable[Sequence], target: StepTarget, context_length: int) -> bool:
        parts = [(one.end - one.num_shared, one.num_shared) for one in sequences if one.generation is None]
        if not self._is_open or not parts:
            return False
        is_worth_it = sum(tokens for tokens, _ in parts) >= MIN_TOKENS
        is_timed = self._cost is None and is_worth_it and context_length >= MIN_CONTEXT
        if is_timed:
            self._cost = measure_trees(target, context_length)
        if self._cost is not None:
            self.num_tokens, self.reason = choose_size(self._cost, parts, DEFAULT_CHUNK)
            self.name = "branches" if self.num_tokens else "rows"
        return is_timed

    @override
    def batches(self, capacity: Capacity) -> TreeBatches | None:
        return TreeBatches(capacity.cells, self.num_tokens) if self.num_tokens else None

    @override
    def memory(self, scored: int, generated: int, context_length: int, row_group: int) -> tuple[int, int]:
        if not self.num_tokens:
            return super().memory(scored, generated, context_length, row_group)
        cells = FIRST_CELL + scored + self.num_tokens if scored else 0
        return generated, min(cells, CELLS_PER_POSITION * context_length)

    @override
    def describe(self) -> Mapping[str, Any]:
        if self._cost is None or self._cost is TYPICAL:
            return super().describe()
        cost = {f"{name}_s": seconds for name, seconds in asdict(self._cost).items()}
        return {**super().describe(), "step_cost": cost}


def choose_size(cost: StepCost, parts: list[tuple[int, int]], row_size: int) -> tuple[int, str]:
    """Tokens of a tree batch, or 0 for one text a step, and why: the cheapest for a plan whose parts are (tokens to
    feed, tokens resident before); a part alone is fed in steps of `row_size`."""
    origin, unit = ("by rule", "tokens' cost") if cost is TYPICAL else ("measured", "s")
    rows = cost.of_rows(parts, row_size)
    batches = {size: cost.of_tree_batches(parts, size) for size in SIZES}
    size = min(batches, key=lambda size: batches[size])
    reason = f"{origin}: {batches[size]:.3g} {unit} expected in steps of {size} tokens, {rows:.3g} {unit} one by one"
    return size if batches[size] < MARGIN * rows else 0, reason


def measure_trees(target: StepTarget, context_length: int, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Times tree batches of three shapes."""
    shapes = [(tokens, min(cells, context_length)) for tokens, cells in SHAPES]
    target.reserve(0, FIRST_CELL + max(cells for _, cells in shapes))
    seconds = []
    for tokens, cells in shapes:
        past = cells - tokens - FIRST_CELL
        cells_P = np.arange(FIRST_CELL, FIRST_CELL + past, dtype=np.int32)
        row, read = Row(SHARED_PREFIX, past, (0,) * tokens, cells_P=cells_P), LogitsRow(0, tokens - 1)
        step = Step((row,), logits_rows=(read,), first_cell=FIRST_CELL + past)
        times = []
        for _ in range(REPEATS):
            begin = clock()
            target.run(step)
            times.append(clock() - begin)
        seconds.append(min(times[1:]))
    factors = [[1, tokens, tokens * cells] for tokens, cells in shapes]
    return StepCost(*np.maximum(np.linalg.solve(np.array(factors, float), seconds), 0).tolist())
