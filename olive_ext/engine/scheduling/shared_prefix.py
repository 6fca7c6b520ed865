"""The slot that branches share, as the scheduler sees it: one path of tokens, and the cell in which each lies.

path     A B C D      after a step with the branches "A B x y" and "A B C D"
cells    1 2 5 6      (x and y lie in 3 and 4)
settled  1 2 3 4      where the next sequence shares all four
"""

from __future__ import annotations

import numpy as np

from olive_ext.engine.scheduling.prefix_tree import common_prefix
from olive_ext.engine.scheduling.sequences import TokenArray
from olive_ext.engine.step import CellArray, Move

FIRST_CELL = 1
"""Cell 0 is never seen: behind no past at all, GroupQueryAttention counts positions by itself."""

CELLS_PER_POSITION = 2
"""Cells that a trunk has at most, for each position of the context: its rotary tables are made to cover them."""


class SharedPrefix:
    """What is resident of the last sequence that was fed. Sequences are to come in sorted order."""

    def __init__(self, capacity: int) -> None:
        self._tokens_P = np.zeros(capacity, np.int32)
        self._cells_P: CellArray = np.zeros(capacity, np.int32)
        self._length = 0
        self._top = FIRST_CELL

    @property
    def top(self) -> int:
        """The cell that the next token goes into."""
        return self._top

    @property
    def room(self) -> int:
        """Cells that are left."""
        return len(self._cells_P) - self._top

    def settle(self, tokens: TokenArray) -> Move | None:
        """Forgets all but what `tokens` shares with the path, and puts that at the bottom."""
        length = self.join(tokens)
        settled = np.arange(FIRST_CELL, FIRST_CELL + length, dtype=np.int32)
        stays = common_prefix(self._cells_P[:length], settled)
        move = Move(self._cells_P[stays:length].copy(), FIRST_CELL + stays) if stays < length else None
        self._cells_P[:length] = settled
        self._top = FIRST_CELL + length
        return move

    def join(self, tokens: TokenArray) -> int:
        """Cuts the path back to what it shares with `tokens`, and answers with how many that are."""
        self._length = common_prefix(self._tokens_P[: self._length], tokens)
        return self._length

    def cells(self) -> CellArray:
        """Where each token of the path lies."""
        cells: CellArray = self._cells_P[: self._length].copy()
        return cells

    def extend(self, tokens: TokenArray) -> None:
        """Notes that `tokens` continue the path, in the next cells."""
        stop = self._length + len(tokens)
        self._tokens_P[self._length : stop] = tokens
        self._cells_P[self._length : stop] = np.arange(self._top, self._top + len(tokens))
        self._length = stop
        self._top += len(tokens)
