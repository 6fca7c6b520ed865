"""Scored sequences in tree batches: how many tokens these have, or whether sequences are scored one by one; which rows
the next step holds, and where their common prefix lies in the cache.

The shared-prefix cache is one path of tokens, each in a cell. Knows no runner; the scheduler takes in the results.

path     A B C D      after a step with the rows "A B x y" and "A B C D"
cells    1 2 5 6      (x and y lie in 3 and 4)
settled  1 2 3 4      where the next sequence shares all four
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from olive_ext.config import ExecutionSettings
from olive_ext.engine.media import border, chunk_end
from olive_ext.engine.requests import TokenArray, common_prefix
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.answer_steps import AnswerSteps
from olive_ext.engine.scheduling.prefix_tree import Plan
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.scheduling.step_cost import (
    MIN_CONTEXT,
    MIN_TOKENS,
    TYPICAL,
    Choice,
    StepCost,
    Target,
    choose,
    measure,
)
from olive_ext.engine.step import FIRST_CELL, SHARED_PREFIX, Batching, CellArray, Move, Row
from olive_ext.model.decisions import DEFAULT_CHUNK

DEFAULT_SIZE = 256
"""Tokens of a tree batch until there has been enough work to measure."""

CELLS_PER_POSITION = 2
"""Cells of the shared-prefix cache at most, for each position of the context: rotary tables are made to cover them."""


@dataclass(frozen=True)
class ScoringForm:
    """What decides the form: the chunk size, or the cost of a step, which is measured or given by a rule."""

    is_open: bool = False
    reason: str = "engine.chunk_size"
    is_measured: bool = True
    pins_answers: bool = False
    """Short answers share steps where the rule says so, whatever the clock says."""

    @classmethod
    def of(cls, settings: ExecutionSettings) -> ScoringForm:
        """Open where the settings name neither the form nor the chunk size; by rule where runs are to repeat."""
        is_open = settings.engine.scoring != "branches" and settings.engine.chunk_size == "auto"
        pins_answers = settings.engine.scoring == "answers"
        is_measured = settings.deterministic is not True
        return cls(is_open, "engine.scoring", is_measured=is_measured, pins_answers=pins_answers)


class ScoringSteps:
    """The present choice; `size` is 0 where sequences are scored one by one, but for the short ones of `answers`."""

    def __init__(self, chunk_size: int, form: ScoringForm, traits: Traits) -> None:
        self._is_packed = traits.batching is Batching.PACKED
        self._is_pinned = not (form.is_open and traits.tree_batches)
        self._cost: StepCost | None = None if form.is_measured else TYPICAL
        size = (DEFAULT_SIZE if form.is_open else chunk_size) if traits.tree_batches else 0
        waiting = "not measured yet: too little work so far" if form.is_measured else "by rule: nothing scored so far"
        self._choice = Choice(size, form.reason if self._is_pinned else waiting)
        self.answers = AnswerSteps(traits, is_measured=form.is_measured and not form.pins_answers)

    @property
    def size(self) -> int:
        return self._choice.size

    def choose(self, plan: Plan, target: Target) -> bool:
        """Takes the cheapest form for `plan`, where the form is open. The first time that a plan is large enough, steps
        of `target` are timed; True then, because that has overwritten the shared-prefix cache, or slots."""
        if self.answers.choose(plan, target):
            return True
        scored = [sequence for sequence in plan.sequences if sequence.generation is None]
        parts = [(sequence.end - sequence.num_shared, sequence.num_shared) for sequence in scored]
        if self._is_pinned or not parts:
            return False
        is_worth_it = sum(tokens for tokens, _ in parts) >= MIN_TOKENS
        is_timed = self._cost is None and is_worth_it and target.traits.context_length >= MIN_CONTEXT
        if is_timed:
            self._cost = measure(target)
        if self._cost is not None:
            self._choice = choose(self._cost, parts, DEFAULT_CHUNK)
        return is_timed

    def describe(self) -> Mapping[str, Any]:
        """The form, the reason, and what was measured (seconds)."""
        alone = "answers" if self.answers.tokens else "rows"
        form = "branches" if self.size else "packed" if self._is_packed else alone
        reason = self.answers.reason if self.answers.is_possible else self._choice.reason
        facts = {"scoring": form, "scoring_step": self.size, "scoring_reason": reason, **self.answers.describe()}
        if self._cost is None or self._cost is TYPICAL:
            return facts
        return {**facts, "step_cost": {f"{name}_s": seconds for name, seconds in asdict(self._cost).items()}}


@dataclass(frozen=True)
class TreeBatchPlan:
    """Rows of a step with their sequences, the tokens that were not fed again, and where the step writes."""

    rows: tuple[tuple[Sequence, Row], ...]
    shared: tuple[int, ...]
    """For each sequence that begins with this step: how many of its tokens were resident."""

    moves: tuple[Move, ...]
    first_cell: int


class TreeBatches:
    """Waiting sequences in sorted order, of which the first may be computed in part."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: cells of the shared-prefix cache."""
        self._prefix = SharedPrefix(capacity)
        self._waiting: deque[Sequence] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def plan(self, num_tokens: int) -> TreeBatchPlan:
        """Rows with `num_tokens` tokens together, fewer where no more are waiting or an item would be cut, more where
        the first row begins with an item of more. The last row may end before its sequence does, which then stays the
        first that waits."""
        move = self._prefix.settle(_to_join(self._waiting[0]))
        first_cell = self._prefix.top
        room = min(num_tokens, self._prefix.room)
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
            row = Row(
                SHARED_PREFIX,
                sequence.computed,
                tuple(tokens.tolist()),
                media=sequence.media,
                cells_P=self._prefix.cells(),
            )
            self._prefix.extend(tokens)
            rows.append((sequence, row))
            room -= len(tokens)
            if stop < sequence.end:
                break
            self._waiting.popleft()
        return TreeBatchPlan(tuple(rows), tuple(shared), (move,) if move else (), first_cell)


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
        """The cell of each token of the path."""
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
