"""Scored sequences as branches of the trunk: which rows the next step holds.

Knows no runner; the scheduler takes in what the step finds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from olive_ext.engine.scheduling.sequences import Sequence, TokenArray
from olive_ext.engine.scheduling.shared_prefix import SharedPrefix
from olive_ext.engine.step import SHARED_PREFIX, Move, Row


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
        self._trunk = SharedPrefix(capacity)
        self._waiting: deque[Sequence] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self._waiting.extend(sequences)

    def plan(self, num_tokens: int) -> TreeBatchPlan:
        """Rows with `num_tokens` tokens together, fewer where no more are waiting. The last may end before its
        sequence does, which then stays the first that waits."""
        move = self._trunk.settle(_to_join(self._waiting[0]))
        first_cell = self._trunk.top
        room = min(num_tokens, self._trunk.room)
        rows: list[tuple[Sequence, Row]] = []
        shared = []
        while room and self._waiting:
            sequence = self._waiting[0]
            is_new = not sequence.computed
            sequence.computed = self._trunk.join(_to_join(sequence))
            if is_new:
                shared.append(sequence.computed)
            stop = min(sequence.end, sequence.computed + room)
            tokens = sequence.tokens[sequence.computed : stop]
            row = Row(SHARED_PREFIX, sequence.computed, tuple(tokens.tolist()), cells_P=self._trunk.cells())
            self._trunk.extend(tokens)
            rows.append((sequence, row))
            room -= len(tokens)
            if stop == sequence.end:
                self._waiting.popleft()
        return TreeBatchPlan(tuple(rows), tuple(shared), (move,) if move else (), first_cell)


def _to_join(sequence: Sequence) -> TokenArray:
    """Tokens that need not be fed where they are resident: those computed, or those before the first score."""
    return sequence.tokens[: sequence.computed or sequence.first_read()]
