"""Sequences that wait for a slot, in sorted order, and which of them a step has room for. Knows no runner.

Where a step takes many of them, one is passed over while an earlier one is about to compute the prefix that both share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from olive_ext.engine.requests import Counters, source_key
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.scheduling.slots import Slots
from olive_ext.engine.step import Copy

LOOK_AHEAD = 256
"""Waiting sequences that are looked at for one that need not wait longer."""


class Admission:
    """Gives slots to waiting sequences."""

    def __init__(self, slots: Slots, traits: Traits, counters: Counters) -> None:
        self._slots = slots
        self._can_share = traits.chunked_prefill
        self._row_group = traits.row_group
        self._counters = counters
        self._waiting: deque[Sequence] = deque()
        self._last: dict[int, Sequence] = {}
        self.wanted: set[int] = set()
        """Slots whose content waiting sequences share."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def admit(self, room: int, most: int) -> Iterator[tuple[Sequence, Copy | None]]:
        """Up to `most` sequences, as long as `room` tokens of the next step are not filled, each in a slot, with the
        copy that puts there what it shares with others."""
        while room > 0 and most > 0 and self._slots.has_free and (sequence := self._next()) is not None:
            if (parent := sequence.parent) is not None:
                parent.num_children -= 1
                if not parent.num_children and self._last.get(parent.slot) is parent:
                    self.wanted.remove(parent.slot)
            limit = self._most_shared(sequence)
            taken = self._slots.take(sequence.tokens, limit, source_key(sequence.source), self.wanted)
            sequence.slot, sequence.computed = taken.slot, taken.shared
            self._last[taken.slot] = sequence
            change = self.wanted.add if sequence.num_children else self.wanted.discard
            change(taken.slot)
            self._counters.prefix_hits += taken.shared > 0
            self._counters.tokens_reused += taken.shared
            self._counters.copies += taken.copy is not None
            room -= sequence.pending
            most -= 1
            yield sequence, taken.copy

    def _most_shared(self, sequence: Sequence) -> int:
        """Tokens that need not be fed again: not those that are read, and of a prompt so few that a group of rows is
        left; a text that is scored gets one."""
        if not self._can_share:
            return 0
        group = self._row_group if sequence.generation is not None else 1
        return max(0, sequence.first_read() + 1 - group)

    def _next(self) -> Sequence | None:
        """Takes out the first sequence that need not wait for a prefix, nor for a slot: one whose content waiting
        sequences share is not overwritten, and no more than half of the slots hold such, while anything else runs."""
        is_idle, num_free = self._slots.is_idle, self._slots.num_free(self.wanted)
        for place in range(min(len(self._waiting), LOOK_AHEAD)):
            sequence = self._waiting[place]
            has_slot = is_idle or self._has_slot(sequence, num_free)
            if has_slot and not self._is_prefix_due(sequence):
                del self._waiting[place]
                return sequence
            if sequence.num_slots > 1 and not has_slot:
                return None  # others would take the slots that it waits for, one by one
        return None

    def _has_slot(self, sequence: Sequence, num_free: int) -> bool:
        """Whether there is a slot that may be overwritten: one of those that are free and not wanted, or that of the
        parent whose last child this is."""
        parent, num_wanted = sequence.parent, len(self.wanted)
        if parent is not None and parent.num_children == 1 and self._last.get(parent.slot) is parent:
            num_wanted -= 1
            num_free += self._slots.is_free(parent.slot)
        is_kept = not sequence.num_children or 2 * num_wanted < self._slots.num_slots
        return is_kept and num_free >= sequence.num_slots

    def _is_prefix_due(self, sequence: Sequence) -> bool:
        """Whether an earlier sequence is still to compute so much of this one's tokens that waiting pays."""
        parent = sequence.parent
        if parent is None or parent.computed >= sequence.num_shared:
            return False
        is_waiting = parent.slot < 0 and not parent.computed
        return is_waiting or sequence.num_shared - parent.num_shared >= self._slots.min_copy
