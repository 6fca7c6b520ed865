"""Which blocks of a paged KV cache each slot holds. The store of a device binds these tables. If there are fewer
blocks than all slots could need, `Slots` keeps equal tables to know which blocks are free.

blocks of 4      slot 0  7 3 9 4 | 1 5       table 0 1
                 slot 1  7 3 9 4 | 1 8       table 0 2    block 2 began as a copy of block 1
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from olive_ext.engine.step import CellArray, Columns, Copy
from olive_ext.errors import MemoryShortageError


class BlockCopy(NamedTuple):
    """The first `num_positions` of block `source` are copied to block `target` before the rows run."""

    source: int
    target: int
    num_positions: int


class BlockTables:
    """The blocks of each slot. A slot writes only into blocks that no other slot holds."""

    def __init__(self, num_slots: int, capacity: int, block_size: int, num_blocks: int | None = None) -> None:
        """`capacity`: positions of a slot. `num_blocks` is by default what all slots need if they share nothing."""
        self.block_size = block_size
        self.blocks_per_slot = self.covering(capacity)
        self.tables_SP: CellArray = np.zeros((num_slots, self.blocks_per_slot), np.int32)
        """The blocks of each slot in the order of its positions; what follows them has no meaning."""

        self._held: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_blocks = num_slots * self.blocks_per_slot if num_blocks is None else num_blocks
        self._num_users = [0] * self.num_blocks
        self._free = list(reversed(range(self.num_blocks)))
        self._own_from_S = np.zeros(num_slots, np.int64)
        self._num_own_S = np.zeros(num_slots, np.int64)
        """The number of blocks of a slot, from that position on, that no other slot holds; 0 where unknown."""

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def covering(self, positions: int) -> int:
        """The number of blocks that hold so many positions."""
        return -(-positions // self.block_size)

    def table(self, slot: int) -> list[int]:
        """The slot's blocks, in the order of its positions."""
        return [*self._held[slot]]

    def fork(self, copy: Copy) -> None:
        """Gives the slot the blocks of another's first positions, in place of its own; with none, drops its own."""
        shared = self._held[copy.source][: self.covering(copy.length)]
        for block in shared:
            self._num_users[block] += 1
        self._num_own_S[copy.source] = self._num_own_S[copy.target] = 0
        self._cut(copy.target, 0)
        self.tables_SP[copy.target, : len(shared)] = self.tables_SP[copy.source, : len(shared)]
        self._held[copy.target] = shared

    def without_room(self, rows: Columns) -> list[tuple[int, int, int]]:
        """Slot, past and tokens of the rows for which `make_room` may have something to do, the shortest past first. Of
        rows that share a block, the one that has most of it keeps it, and the others copy fewer positions."""
        stops_B, slots_B = rows.past_B + rows.lengths_B, rows.slots_B
        has_room_B = -(-stops_B // self.block_size) == self._num_own_S[slots_B]
        is_due_B = ~(has_room_B & (rows.past_B >= self._own_from_S[slots_B]))
        due = (column[is_due_B].tolist() for column in (slots_B, rows.past_B, rows.lengths_B))
        return sorted(zip(*due, strict=True), key=lambda row: row[1])

    def missing(self, slot: int, past: int, num_tokens: int) -> int:
        """The most blocks that `make_room` takes, without those that it gives back."""
        held, kept = self._held[slot], self.covering(past)
        freed = sum([self._num_users[block] == 1 for block in held[kept:]])
        return self.covering(past + num_tokens) - kept + self._is_last_shared(slot, past) - freed

    def make_room(self, slot: int, past: int, num_tokens: int) -> BlockCopy | None:
        """Cuts the slot back to `past` positions and gives it blocks for `num_tokens` more. Returns the copy that must
        be made where the last of those positions lie in a shared block. Calling it again changes nothing. Raises
        `MemoryShortageError` where there are too few blocks."""
        held, kept = self._held[slot], self.covering(past)
        copy = None
        if len(held) > kept:
            self._cut(slot, kept)
        if self._is_last_shared(slot, past):
            copy = BlockCopy(held[-1], self._take(), past % self.block_size)
            self._num_users[held[-1]] -= 1
            self.tables_SP[slot, kept - 1] = held[-1] = copy.target
        for place in range(len(held), self.covering(past + num_tokens)):
            held.append(self._take())
            self.tables_SP[slot, place] = held[-1]
        self._own_from_S[slot], self._num_own_S[slot] = past, len(held)
        return copy

    def _is_last_shared(self, slot: int, past: int) -> bool:
        """Whether the last of so many positions lies in a block that is shared and not full."""
        return past % self.block_size > 0 and self._num_users[self._held[slot][past // self.block_size]] > 1

    def _take(self) -> int:
        if not self._free:
            raise MemoryShortageError(f"all {self.num_blocks} blocks of the KV cache are taken")
        block = self._free.pop()
        self._num_users[block] = 1
        return block

    def _cut(self, slot: int, length: int) -> None:
        for block in reversed(self._held[slot][length:]):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free.append(block)
        del self._held[slot][length:]
