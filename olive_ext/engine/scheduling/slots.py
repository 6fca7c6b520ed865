"""The rows of the KV cache as the scheduler sees them: which tokens each holds, and who has taken it.

slot 0   7 3 9 4 1 .  busy      take(7 3 9 8):  slot 2 is free and shares 2 tokens, slot 0 is busy and shares 3
slot 1   5 5 . . . .  free      -> slot 2 is taken, 3 tokens are copied into it from slot 0, then 8 is fed
slot 2   7 3 2 . . .  free
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olive_ext.engine.requests import TokenArray, common_prefix
from olive_ext.engine.step import Copy

MIN_COPY = 16
"""Positions that a copy from a busy slot must save; below that feeding the tokens costs less than the copy."""


@dataclass(frozen=True)
class Taken:
    """The slot taken, how many of the wanted tokens are resident there, and the copy that puts them there."""

    slot: int
    shared: int
    copy: Copy | None


class Slots:
    """Tokens resident in each slot. A released slot keeps its tokens until it is taken again."""

    def __init__(self, num_slots: int, capacity: int, can_rewind: bool = True) -> None:
        self._can_rewind = can_rewind
        self._checkpoints: list[list[int]] = [[] for _ in range(num_slots)]
        self._tokens_SP = np.zeros((num_slots, capacity), np.int32)
        self._sources = [""] * num_slots
        self._lengths = [0] * num_slots
        self._released = [0] * num_slots
        self._clock = 0
        self._busy: set[int] = set()

    @property
    def num_slots(self) -> int:
        return len(self._lengths)

    @property
    def has_free(self) -> bool:
        return len(self._busy) < self.num_slots

    @property
    def capacity(self) -> int:
        """Positions of a slot."""
        return int(self._tokens_SP.shape[1])

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def take(self, tokens: TokenArray, limit: int, source: str = "") -> Taken:
        """Takes the free slot that shares most of `tokens[:limit]`; among equals the longest unused one.

        What is resident behind another `source` (its key) is not shared.
        """
        shared = [
            self._reusable(slot, tokens[:limit]) if self._sources[slot] == source else 0
            for slot in range(self.num_slots)
        ]
        free = [slot for slot in range(self.num_slots) if slot not in self._busy]
        slot = min(free, key=lambda s: (-shared[s], self._released[s], s))
        giver = max(self._busy, key=lambda s: shared[s], default=slot)
        copy = None
        if shared[giver] >= shared[slot] + MIN_COPY:
            copy = Copy(giver, slot, shared[giver])
        length = shared[giver] if copy else shared[slot]
        kept = [length] if copy else [one for one in self._checkpoints[slot] if one <= length]
        self._checkpoints[slot] = kept
        self._tokens_SP[slot, :length] = tokens[:length]
        self._lengths[slot] = length
        self._sources[slot] = source
        self._busy.add(slot)
        return Taken(slot, length, copy)

    def extend(self, slot: int, tokens: tuple[int, ...], is_checkpoint: bool = False) -> None:
        """Adds `tokens` to what is resident in the slot. With `is_checkpoint` its content up to there is kept."""
        start = self._lengths[slot]
        if is_checkpoint:
            self._checkpoints[slot].append(start + len(tokens))
        self._lengths[slot] = start + len(tokens)
        self._tokens_SP[slot, start : start + len(tokens)] = tokens

    def release(self, slot: int) -> None:
        """Frees the slot. In one that can be rewound, one position stays unused, where an idle row may write."""
        self._busy.remove(slot)
        self._clock += 1
        self._released[slot] = self._clock
        if self._can_rewind:
            self._lengths[slot] = min(self._lengths[slot], self.capacity - 1)

    def _reusable(self, slot: int, tokens: TokenArray) -> int:
        """How many of `tokens`, from the first on, are resident in the slot and need not be fed again."""
        length = self._lengths[slot]
        shared = common_prefix(self._tokens_SP[slot, :length], tokens)
        if self._can_rewind or shared == length:
            return shared
        return max((kept for kept in self._checkpoints[slot] if kept <= shared), default=0)
