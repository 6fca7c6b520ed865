"""Sequences that wait for a slot, in sorted order, and which of them a step has room for. Knows no runner.

Where a step takes many of them, one is passed over while an earlier one is about to compute the prefix that both share.
Where a step takes one input or many short answers, inputs come first until as many answers as there are slots wait for
nothing but these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from olive_ext.engine.requests import Counters, source_key
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.scheduling.slots import Slots

LOOK_AHEAD = 256
"""Waiting sequences that are looked at for one that need not wait longer."""


class Admission:
    """Gives slots to waiting sequences."""

    def __init__(self, slots: Slots, traits: Traits, counters: Counters, answer_tokens: int = 0) -> None:
        """`answer_tokens`: the most tokens of a text, behind what it shares, that is fed one token a step."""
        self._slots = slots
        self._answer_tokens = answer_tokens
        self._can_share = traits.chunked_prefill
        self._row_group = traits.row_group
        self._counters = counters
        self._inputs: deque[Sequence] = deque()
        self._answers: deque[Sequence] = deque()
        self._last: dict[int, Sequence] = {}
        self.wanted: set[int] = set()
        """Slots whose content waiting sequences share."""

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._inputs) + len(self._answers)

    def add(self, sequence: Sequence) -> None:
        """Takes sequences in sorted order."""
        is_answer = self._is_answer(sequence, sequence.num_shared, self._answer_tokens)
        (self._answers if is_answer else self._inputs).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Takes one that has given up its slot: it comes before all others."""
        if self._last.get(sequence.slot) is sequence:
            del self._last[sequence.slot]
            self.wanted.discard(sequence.slot)
        sequence.give_up()
        self._inputs.appendleft(sequence)

    def admit(self, room: int, most: int, blocks_due: int = 0) -> Iterator[Sequence]:
        """Up to `most` inputs, as long as `room` tokens of the next step are not filled, each in a slot, where what it
        shares with others is copied to; and any number of short answers. `blocks_due`: blocks that those which run are
        to get."""
        while room > 0 and most > 0 and self._slots.has_free and (sequence := self._next()) is not None:
            blocks_due += self._slots.blocks_due(sequence)
            if not self._slots.reclaim(blocks_due, self.wanted) and not self._slots.is_idle:
                self._inputs.appendleft(sequence)
                return
            likely = 0
            if (parent := sequence.parent) is not None:
                parent.num_children -= 1
                if self._last.get(parent.slot) is parent:
                    likely = parent.slot
                    if not parent.num_children:
                        self.wanted.remove(parent.slot)
            limit, source = self._most_shared(sequence), source_key(sequence.source)
            taken = self._slots.take(sequence.tokens, limit, source, self.wanted, sequence.media, likely)
            sequence.slot, sequence.computed = taken.slot, taken.shared
            self._last[taken.slot] = sequence
            change = self.wanted.add if sequence.num_children else self.wanted.discard
            change(taken.slot)
            self._counters.prefix_hits += taken.shared > 0
            self._counters.tokens_reused += taken.shared
            self._counters.copies += taken.is_copied
            most_fed = self._answer_tokens and self._answer_tokens + self._slots.min_copy - 1
            sequence.is_answer = self._is_answer(sequence, taken.shared, most_fed)
            if not sequence.is_answer:
                room -= sequence.pending
                most -= 1
            yield sequence

    @staticmethod
    def _is_answer(sequence: Sequence, num_shared: int, most: int) -> bool:
        """Whether it has up to `most` tokens behind those that it shares, all text: it is fed one token a step."""
        is_text = not sequence.media or sequence.media[-1].stop <= num_shared
        return sequence.generation is None and sequence.end - num_shared <= most and is_text

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
        is_idle = self._slots.is_idle
        found = self._take_out(self.wanted) if self._answers or not is_idle else None
        return self._take_out(set()) if found is None and is_idle else found

    def _take_out(self, wanted: set[int]) -> Sequence | None:
        """The first sequence that need not wait for a prefix, nor for a slot that is not `wanted`."""
        num_free = self._slots.num_free(wanted)
        kinds = [(self._inputs, 1 if self._answers else LOOK_AHEAD), (self._answers, LOOK_AHEAD)]
        if self._answers and self._num_children() >= num_free:
            kinds.reverse()
        for waiting, look_ahead in kinds:
            for place in range(min(len(waiting), look_ahead)):
                sequence = waiting[place]
                is_due = self._is_prefix_due(sequence)
                if is_due and sequence.num_slots == 1:
                    continue
                has_slot = self._has_slot(sequence, wanted, num_free)
                if has_slot and not is_due:
                    del waiting[place]
                    return sequence
                if sequence.num_slots > 1 and not has_slot:
                    return None  # others would take the slots that it waits for, one by one
        return None

    def _num_children(self) -> int:
        return sum([last.num_children for last in self._last.values()])

    def _has_slot(self, sequence: Sequence, wanted: set[int], num_free: int) -> bool:
        """Whether there is a slot that may be overwritten: one of those that are free and not `wanted`, or that of the
        parent whose last child this is."""
        parent, num_wanted = sequence.parent, len(wanted)
        if parent is not None and parent.num_children == 1 and self._last.get(parent.slot) is parent:
            is_wanted = parent.slot in wanted
            num_wanted -= is_wanted
            num_free += is_wanted and self._slots.is_free(parent.slot)
        is_kept = not sequence.num_children or 2 * num_wanted < self._slots.num_slots
        return is_kept and num_free >= sequence.num_slots

    def _is_prefix_due(self, sequence: Sequence) -> bool:
        """Whether an earlier sequence is still to compute so much of this one's tokens that waiting pays."""
        parent = sequence.parent
        if parent is None or parent.computed >= sequence.num_shared:
            return False
        is_waiting = parent.slot < 0 and not parent.computed
        return is_waiting or sequence.num_shared - parent.num_shared >= self._slots.min_copy
