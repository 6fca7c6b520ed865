"""The memory of a runner, as far as the planning of steps depends on it."""

from __future__ import annotations

from typing import NamedTuple


class Blocks(NamedTuple):
    """The blocks of a paged KV cache: how many there are, and the positions of each."""

    number: int
    size: int


NO_BLOCKS = Blocks(0, 0)

UNLIMITED = 2**31
"""The most tokens of a step, or positions of all slots, where nothing else limits them."""


class Capacity(NamedTuple):
    """The memory that a runner has allocated. It changes when requests need more, or when memory runs short."""

    num_slots: int
    positions: int = 0
    """Positions of each slot."""

    cells: int = 0
    """Cells of the shared-prefix cache."""

    blocks: Blocks = NO_BLOCKS
    """The blocks that slots take as they grow. There may be fewer than all slots together could need."""

    most_positions: int = UNLIMITED
    """The positions of all slots together that fit in memory."""

    def for_sequences(self, positions: int) -> Capacity:
        """The capacity with as many slots as fit for sequences of that many positions."""
        fitting = max(1, self.most_positions // max(1, positions))
        return self if fitting >= self.num_slots else self._replace(num_slots=fitting)

    def both(self, other: Capacity) -> Capacity:
        """The smaller value of each kind of memory."""
        blocks = [capacity.blocks for capacity in (self, other) if capacity.blocks.number]
        positions, cells = min(self.positions, other.positions), min(self.cells, other.cells)
        most = min(self.most_positions, other.most_positions)
        return Capacity(min(self.num_slots, other.num_slots), positions, cells, min(blocks, default=NO_BLOCKS), most)
