"""Scored texts that have no slots: which rows the next tree batch holds, and in which cells they lie.

The shared-prefix cache is one path of tokens, each in a cell.

path     A B C D      after a step with the rows "A B x y" and "A B C D"
cells    1 2 5 6      (x and y lie in 3 and 4)
settled  1 2 3 4      where the next sequence shares all four
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from olive_ext.engine.requests import TokenArray, common_prefix
from olive_ext.engine.scheduling.sequences import ChosenRows, Sequence
from olive_ext.engine.step import FIRST_CELL, SHARED_PREFIX, CellArray, Move, Row
from olive_ext.media.items import border, chunk_end


class TreeBatch(NamedTuple):
    """A planned step of scored texts that have no slots: its rows, and where the step writes."""

    chosen: ChosenRows
    shared: tuple[int, ...]
    """For each sequence that begins with this step how many of its tokens were resident."""

    moves: tuple[Move, ...]
    first_cell: int


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

    def plan(self, limit: int) -> TreeBatch:
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
        return TreeBatch(ChosenRows(rows), tuple(shared), (move,) if move else (), first_cell)


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
