"""The rows of the KV cache as the scheduler sees them: which tokens each holds, and who has taken it.

slot 0   7 3 9 4 1 .  busy      take(7 3 9 8):  slot 2 is free and shares 2 tokens, slot 0 is busy and shares 3
slot 1   5 5 . . . .  free      -> slot 2 is taken, 3 tokens are copied into it from slot 0, then 8 is fed
slot 2   7 3 2 . . .  free
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from olive_ext.engine.media.items import Media, border
from olive_ext.engine.requests import TokenArray, common_prefix, integers
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.step import Capacity, Copy, Row


@dataclass(frozen=True)
class Taken:
    """The slot taken, how many of the wanted tokens are resident there, and the copy that puts them there."""

    slot: int
    shared: int
    copy: Copy | None


class Slots:
    """Tokens resident in each slot. A released slot keeps its tokens until it is taken again."""

    def __init__(self, traits: Traits, capacity: Capacity, answer_tokens: int = 0) -> None:
        """With short answers (`answer_tokens`) the first sequence does not overwrite what waiting ones share."""
        form, num_slots = traits.form.in_slots, capacity.num_slots
        self.num_slots = num_slots
        self.min_copy = form.min_copy(answer_tokens)
        self._can_rewind = traits.can_rewind
        self._has_blocks = form.has_blocks
        self._keeps_wanted = answer_tokens > 0
        self._row_group = traits.row_group
        self._checkpoints: list[list[int]] = [[] for _ in range(num_slots)]
        self._tokens_SP = np.zeros((num_slots, capacity.positions), np.int32)
        self._sources = [""] * num_slots
        self._lengths = [0] * num_slots
        self._used_at = [0] * num_slots
        self._clock = 0
        self._busy: set[int] = set()

    @property
    def has_free(self) -> bool:
        """Whether a slot may be taken."""
        return len(self._busy) < self.num_slots

    @property
    def is_idle(self) -> bool:
        """Whether none is taken."""
        return not self._busy

    def is_free(self, slot: int) -> bool:
        """Whether nobody has taken the slot."""
        return slot not in self._busy

    def num_free(self, wanted: set[int]) -> int:
        """Free slots that are not `wanted`."""
        return self.num_slots - len(self._busy | wanted)

    @property
    def capacity(self) -> int:
        """Positions of a slot."""
        return int(self._tokens_SP.shape[1])

    def idle_position(self, slot: int) -> int:
        """Where an idle row writes: behind what is resident, or over the unshared last position of a full slot."""
        return min(self._lengths[slot], self.capacity - 1)

    def take(
        self, tokens: TokenArray, limit: int, source: str = "", wanted: Container[int] = frozenset(), media: Media = ()
    ) -> Taken:
        """Takes the free slot that shares most of `tokens[:limit]`; among equals, and where they are copied from
        another one, the longest unused. Slots of blocks share what any of them holds, so always the longest unused is
        taken. The `wanted` ones come last.

        What is resident behind another `source` (its key) is not shared, and of the items of `media` none in part.
        """
        shared = self._reusable(tokens[:limit], source, media)
        free = [slot for slot in range(self.num_slots) if slot not in self._busy]
        oldest = self._oldest(wanted)
        kept = wanted if self._keeps_wanted else ()
        slot = oldest if self._has_blocks else min([(s in kept, -shared[s], self._used_at[s], s) for s in free])[3]
        givers = range(self.num_slots) if self._has_blocks or self._keeps_wanted else self._busy
        giver = max(givers, key=shared.__getitem__, default=slot)
        copy = None
        if shared[giver] >= shared[slot] + self.min_copy:
            slot = oldest
            copy = Copy(giver, slot, shared[giver])
            self._note_use(giver)
        length = shared[giver] if copy else shared[slot]
        self._checkpoints[slot] = [length] if copy else [one for one in self._checkpoints[slot] if one <= length]
        self._tokens_SP[slot, :length] = tokens[:length]
        self._lengths[slot] = length
        self._sources[slot] = source
        self._busy.add(slot)
        return Taken(slot, length, copy)

    def take_empty(self, wanted: Container[int] = frozenset()) -> int:
        """Takes the longest unused free slot, whose content is not shared; the `wanted` ones come last."""
        slot = self._oldest(wanted)
        self._lengths[slot], self._checkpoints[slot] = 0, []
        self._busy.add(slot)
        return slot

    def fork(self, source: int, target: int) -> Copy:
        """Makes all that is resident in `source` resident in `target`, too; the copy that does it."""
        length = self._lengths[source]
        given, held = self._tokens_SP[source, :length], self._tokens_SP[target, : self._lengths[target]]
        num_equal = common_prefix(given, held) if self._sources[source] == self._sources[target] else 0
        self._tokens_SP[target, :length] = given
        self._lengths[target], self._checkpoints[target] = length, [length]
        self._sources[target] = self._sources[source]
        return Copy(source, target, length, num_equal)

    def extend(self, fed: Iterable[tuple[Row, Sequence[int]]]) -> None:
        """Adds the tokens fed to each row to its slot's; at a checkpoint the content up to there is kept."""
        for row, tokens in fed:
            slot, length = row.slot, len(tokens)
            start = self._lengths[slot]
            if row.is_checkpoint:
                self._checkpoints[slot].append(start + length)
            self._lengths[slot] = start + length
            if length == 1:
                self._tokens_SP[slot, start] = tokens[0]
            else:
                self._tokens_SP[slot, start : start + length] = integers(tokens)

    def release(self, slot: int) -> None:
        """Frees the slot. In one that can be rewound, one position stays unused, where an idle row may write."""
        self._busy.remove(slot)
        self._note_use(slot)
        if self._can_rewind:
            self._lengths[slot] = min(self._lengths[slot], self.capacity - 1)

    def _oldest(self, wanted: Container[int]) -> int:
        return min([(s in wanted, self._used_at[s], s) for s in range(self.num_slots) if s not in self._busy])[2]

    def _note_use(self, slot: int) -> None:
        self._clock += 1
        self._used_at[slot] = self._clock

    def _reusable(self, tokens: TokenArray, source: str, media: Media) -> list[int]:
        """How many of `tokens`, from the first on, are resident in each slot and need not be fed again."""
        differs_SP = np.empty((self.num_slots, len(tokens) + 1), np.bool_)
        differs_SP[:, -1] = True  # ends what is equal
        np.not_equal(self._tokens_SP[:, : len(tokens)], tokens, out=differs_SP[:, :-1])
        equal_S = np.minimum(differs_SP.argmax(1), np.array(self._lengths))
        equal = (equal_S if self._row_group == 1 else equal_S - equal_S % self._row_group).tolist()
        if media:
            equal = [border(media, length, self._row_group) for length in equal]
        if not self._can_rewind:
            equal = [self._kept(slot, length) for slot, length in enumerate(equal)]
        return [length if own == source else 0 for length, own in zip(equal, self._sources, strict=True)]

    def _kept(self, slot: int, length: int) -> int:
        """Where a slot that keeps checkpoints only can be cut back to, of its first `length` tokens."""
        if length == self._lengths[slot]:
            return length
        return max((kept for kept in self._checkpoints[slot] if kept <= length), default=0)
