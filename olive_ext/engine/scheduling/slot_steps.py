"""Steps of sequences in slots: which get one, which rows the next step has, and when a slot is free again. Which rows
share a step is the form's to say. Knows no runner, and no step's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from olive_ext.engine.capacity import UNLIMITED, Capacity
from olive_ext.engine.forms.base import ReadySequences
from olive_ext.engine.requests import Counters
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.admission import Admission
from olive_ext.engine.scheduling.beams import BeamGroup
from olive_ext.engine.scheduling.chosen_rows import ChosenRows
from olive_ext.engine.scheduling.planned_step import PlannedStep, planned
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.scheduling.slots import Slots
from olive_ext.engine.step import IDLE_TOKEN, Candidates, Row, Side


class SlotSteps:
    """The sequences that have slots, those that wait for one, and the next step of them."""

    def __init__(
        self, traits: Traits, capacity: Capacity, counters: Counters, chunk_size: int, answer_tokens: int, side: Side
    ) -> None:
        """All sequences are on one `side`. `chunk_size`: tokens of inputs in a step; `answer_tokens`: the most of a
        text, behind what it shares, that is fed one token a step."""
        self._form = traits.form.in_slots
        self.slots = Slots(traits, capacity, answer_tokens)
        self._traits = traits
        self._side = side
        self._chunk_size = chunk_size
        self._counters = counters
        self.waiting = Admission(self.slots, traits, counters, answer_tokens)
        """Sequences without a slot."""

        self._running: dict[int, Sequence] = {}
        self.beams: dict[int, BeamGroup] = {}
        """Beam searches by the slots of their sequences."""

        self.limit = UNLIMITED

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running."""
        return bool(self._running) or self.waiting.num_waiting > 0

    def plan(self, before: PlannedStep | None = None) -> PlannedStep | None:
        """The next step; there is work left. Behind a step `before` that has not been read rows that decode are fed
        with what it finds; None where nothing can be computed until it is read. Where a token of that is chosen on the
        host, its sequence is not in the step: that has inputs then, or those that decode stay together. Nor is one
        whose next token is forced, which happens to few at a time."""
        found, is_complete = self._expected(before) if before is not None else ({}, True)
        self._admit()
        while True:
            ready = [one for one in self._running.values() if one.computed < one.end]
            if not ready or not (is_complete or [one for one in ready if not one.is_input_computed]):
                return None
            self._close_gaps()
            chosen = self._rows(ready)
            if self.slots.make_room(chosen.rows, self.waiting.wanted):
                return self._step(chosen, found)
            if before is not None:
                return None
            self._preempt()

    def _preempt(self) -> None:
        """Gives up the sequence that came last: its blocks are free, and it is computed again when there are enough."""
        last = next(one for one in reversed([*self._running.values()]) if one.num_slots == 1)
        self.release(last)
        self.waiting.put_back(last)
        self._counters.preemptions += 1

    def _expected(self, before: PlannedStep) -> tuple[dict[Sequence, int], bool]:
        """The sequences whose next token that step finds, with its logits row, and whether these are all that go on.
        The slot of one whose last token it finds is free."""
        found: dict[Sequence, int] = {}
        is_complete = True
        for number, (sequence, _, is_next) in enumerate(before.readings):
            if not is_next or sequence.has_ended:
                continue
            if sequence.end == len(sequence.tokens) and sequence.num_slots == 1:
                self.release(sequence)
            elif sequence.needs_rows or sequence.num_slots > 1:
                is_complete = False
            elif sequence.end < sequence.room and sequence.expect():
                found[sequence] = number
        return found, is_complete

    def advance_beams(self, sequence: Sequence, found: Candidates) -> None:
        """Takes in what may follow one of the sequences; forks are made before the next step of slots."""
        beams = self.beams[sequence.slot]
        beams.put(sequence, found)
        self._counters.copies += beams.advance()
        if sequence.answer is not None and sequence.has_ended:
            self._counters.tokens_generated += len(sequence.answer.generated)

    def retire(self, sequence: Sequence, overlapped: PlannedStep | None) -> None:
        """The slot of a generation that is complete is free, unless a step that has begun still writes there."""
        for one in self.beams[sequence.slot].members if sequence.num_slots > 1 else (sequence,):
            is_running = self._running.get(one.slot) is one
            if is_running and (overlapped is None or one not in overlapped.sequences):
                self.release(one)

    def release(self, sequence: Sequence) -> None:
        """Frees the sequence's slot."""
        del self._running[sequence.slot]
        self.beams.pop(sequence.slot, None)
        self.slots.release(sequence.slot)

    @property
    def _most_tokens(self) -> int:
        most, group = min(self.limit, self._chunk_size), self._traits.row_group
        return max(group, most - most % group)

    def _admit(self) -> None:
        """Gives slots to waiting sequences: to as many as form and blocks have room for, and to short answers."""
        if not (self.waiting.num_waiting and self.slots.has_free):
            return
        inputs = [one for one in self._running.values() if one.computed < one.num_input and not one.is_answer]
        room, most = self._form.room(self._most_tokens, sum([one.end - one.computed for one in inputs]))
        blocks_due = sum([self.slots.blocks_due(one) for one in self._running.values()])
        for sequence in self.waiting.admit(room, most, blocks_due):
            self._running[sequence.slot] = sequence
            if sequence.num_slots > 1:
                beams = BeamGroup(sequence, self.slots, self.waiting.wanted)
                self._running |= {one.slot: one for one in beams.members}
                self.beams |= {one.slot: beams for one in beams.members}

    def _close_gaps(self) -> None:
        """Moves the last of the sequences that decode into free slots between them, where none waits for these: a copy
        costs about as much as an idle row, which every step would have. Not where steps overlap, because devices do
        many rows at once."""
        if not self._form.spans_slots or self._traits.overlaps_steps or self.waiting.num_waiting or self.beams:
            return
        if not all(one.is_input_computed for one in self._running.values()):
            return
        taken = sorted(self._running)
        for target in [slot for slot in range(taken[0], taken[-1]) if self.slots.is_free(slot)]:
            source = taken.pop()
            if source < target:
                return
            sequence = self._running.pop(source)
            self.slots.move(source, target)
            sequence.slot, self._running[target] = target, sequence
            self._counters.copies += 1

    def _rows(self, ready: list[Sequence]) -> ChosenRows:
        """The next rows: but for plain ones in the order of their slots, with idle ones where the runner needs them."""
        traits, limits = self._traits, (self._most_tokens, self.limit, self.slots.capacity)
        chosen = self._form.next_rows(
            ReadySequences(ready, *limits, traits.can_rewind, traits.chunked_prefill, traits.row_group)
        )
        rows = {row.slot: (sequence, row) for sequence, row in chosen.others}
        if not rows:
            return chosen
        span = self._form.slots_of(sorted(rows), self.slots.num_slots)
        idle = (Row(slot, self.slots.idle_position(slot), (IDLE_TOKEN,)) for slot in span if slot not in rows)
        rows |= {row.slot: (None, row) for row in idle}
        return replace(chosen, others=[rows[slot] for slot in span])

    def _step(self, chosen: ChosenRows, found: Mapping[Sequence, int]) -> PlannedStep:
        copies, self.slots.copies = tuple(self.slots.copies), []
        follows = tuple([-1 if one is None else found.get(one, -1) for one in chosen.sequences]) if found else ()
        more: dict[str, Any] = {"copies": copies, "whole_length": self._side.first, "follows": follows}
        return planned(chosen, self.beams, **more)
