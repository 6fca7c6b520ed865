"""Which blocks of a pool hold the positions of each slot, and how many slots name each block. Knows no memory.

A prefix that slots share is named by all of their tables. A slot writes only into blocks that it alone names: the block
in which a shared prefix ends is copied when one of its slots is about to write there.

blocks of 4      slot 0  7 3 9 4 | 1 5       table 0 1
                 slot 1  7 3 9 4 | 1 8       table 0 2    block 2 began as a copy of block 1
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from olive_ext.engine.step import CellArray, Copy


class BlockCopy(NamedTuple):
    """Block `source` is copied to block `target` before the rows run."""

    source: int
    target: int


class BlockTables:
    """As many blocks as all slots need if they share nothing, so that there is always a free one."""

    def __init__(self, num_slots: int, capacity: int, block_size: int) -> None:
        """`capacity`: positions of a slot."""
        self.block_size = block_size
        self.blocks_per_slot = self._covering(capacity)
        self.tables_SP: CellArray = np.zeros((num_slots, self.blocks_per_slot), np.int32)
        """The blocks of each slot in the order of its positions, and any numbers of blocks behind those."""

        self._lengths = [0] * num_slots
        self._num_users = [0] * (num_slots * self.blocks_per_slot)
        self._free = list(reversed(range(self.num_blocks)))

    @property
    def num_blocks(self) -> int:
        return len(self._num_users)

    @property
    def num_used(self) -> int:
        """Blocks that hold something."""
        return self.num_blocks - len(self._free)

    def table(self, slot: int) -> list[int]:
        """The slot's blocks, in the order of its positions."""
        blocks: list[int] = self.tables_SP[slot, : self._lengths[slot]].tolist()
        return blocks

    def fork(self, copy: Copy) -> None:
        """Makes the first positions of a slot those of another, by naming its blocks."""
        shared = self.table(copy.source)[: self._covering(copy.length)]
        for block in shared:
            self._num_users[block] += 1
        self._cut(copy.target, 0)
        self.tables_SP[copy.target, : len(shared)] = shared
        self._lengths[copy.target] = len(shared)

    def make_room(self, slot: int, past: int, num_tokens: int) -> BlockCopy | None:
        """Cuts the slot back to `past` positions and gives it blocks for `num_tokens` more; the copy that must be made
        where the last of those positions lie in a block that others name, too. Calling it again changes nothing."""
        kept, wanted = -(-past // self.block_size), -(-(past + num_tokens) // self.block_size)
        if self._lengths[slot] > kept:
            self._cut(slot, kept)
        copy = None
        if past % self.block_size and self._num_users[last := int(self.tables_SP[slot, kept - 1])] > 1:
            copy = BlockCopy(last, self._take())
            self._num_users[last] -= 1
            self.tables_SP[slot, kept - 1] = copy.target
        for place in range(self._lengths[slot], wanted):
            self.tables_SP[slot, place] = self._take()
        self._lengths[slot] = wanted
        return copy

    def _covering(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _take(self) -> int:
        block = self._free.pop()
        self._num_users[block] = 1
        return block

    def _cut(self, slot: int, length: int) -> None:
        for block in reversed(self.table(slot)[length:]):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free.append(block)
        self._lengths[slot] = length
