"""Steps of sequences in slots: which get one, which rows the next step has, and when a slot is free again. Which rows
share a step is the form's to say. Knows no runner, and no step's output.
"""

from __future__ import annotations

from typing import Any

from olive_ext.engine.forms.base import IDLE_TOKEN, ReadySequences
from olive_ext.engine.requests import Counters
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.admission import Admission
from olive_ext.engine.scheduling.beams import BeamGroup
from olive_ext.engine.scheduling.overlapped_steps import following
from olive_ext.engine.scheduling.planned_step import PlannedStep, planned
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.scheduling.slots import Slots
from olive_ext.engine.step import UNLIMITED, Candidates, Capacity, Copy, Row, Side


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

        self._forks: list[Copy] = []
        self.limit = UNLIMITED

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running."""
        return bool(self._running) or self.waiting.num_waiting > 0

    def plan(self) -> PlannedStep:
        """The next step; there is work left."""
        return self._rows_plan(self._admit())

    def followed_by_its_tokens(self, present: PlannedStep) -> PlannedStep | None:
        """A step fed with the tokens that the present one finds; None where other slots would be computed."""
        if not present.finds_next:
            return None
        members = set(present.sequences)
        running = list(self._running.values())
        if [True for sequence in running if sequence.is_forced]:
            return None
        ready = [s for s in running if (not s.has_ended and s.end < s.room if s in members else s.computed < s.end)]
        is_prompt_due = [s for s in ready if s.end - s.computed > 1 and s not in members]
        has_room = self.slots.has_free or len(ready) < len(running)
        if not ready or is_prompt_due or (has_room and self.waiting.num_waiting):
            return None
        chosen = set(self._form.decoding(ready, self.limit))
        slots = sorted([sequence.slot for sequence in chosen])
        together = self._form.slots_of(slots, self.slots.num_slots)
        if not chosen <= members or together != [row.slot for row in present.step.rows]:
            return None
        return following(present, chosen, self.slots.capacity)

    def followed_by_inputs(self) -> PlannedStep | None:
        """A step that computes inputs, of which the present one finds nothing; sequences that wait for a token of that
        are not in it. None where no input is left: then those that decode stay together."""
        copies = self._admit()
        if all(not sequence.pending or sequence.is_input_computed for sequence in self._running.values()):
            return None
        return self._rows_plan(copies)

    def advance_beams(self, sequence: Sequence, found: Candidates) -> None:
        """Takes in what may follow one of the sequences; forks are made before the next step of slots."""
        beams = self.beams[sequence.slot]
        beams.put(sequence, found)
        self._forks += beams.advance()
        if sequence.answer is not None and sequence.has_ended:
            self._counters.tokens_generated += len(sequence.answer.generated)

    def retire(self, sequence: Sequence, overlapped: PlannedStep | None) -> None:
        """The slot of a generation that is complete is free, unless a step that has begun still writes there."""
        beams = self.beams.get(sequence.slot)
        for one in [sequence] if beams is None else beams.members:
            if overlapped is None or one not in overlapped.sequences:
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

    def _admit(self) -> tuple[Copy, ...]:
        """Gives slots to waiting sequences: to as many as the form has room for, and to short answers."""
        if not self.waiting.num_waiting:
            return ()
        inputs = [one for one in self._running.values() if one.computed < one.num_input and not one.is_answer]
        room, most = self._form.room(self._most_tokens, sum([one.end - one.computed for one in inputs]))
        copies: list[Copy] = []
        for sequence, copy in self.waiting.admit(room, most):
            self._running[sequence.slot] = sequence
            if sequence.num_slots > 1:
                beams = BeamGroup(sequence, self.slots, self.waiting.wanted)
                self._running |= {one.slot: one for one in beams.members}
                self.beams |= {one.slot: beams for one in beams.members}
            copies += [copy] if copy else []
        return tuple(copies)

    def _rows_plan(self, copies: tuple[Copy, ...]) -> PlannedStep:
        """The next rows, and idle ones where the runner needs them."""
        ready = [one for one in self._running.values() if one.computed < one.end]
        traits, limits = self._traits, (self._most_tokens, self.limit, self.slots.capacity)
        chosen = self._form.next_rows(
            ReadySequences(ready, *limits, traits.can_rewind, traits.chunked_prefill, traits.row_group)
        )
        rows = {sequence.slot: (sequence, row) for sequence, row in chosen}
        span = self._form.slots_of(sorted(rows), self.slots.num_slots)
        filled = tuple(
            [rows.get(slot) or (None, Row(slot, self.slots.idle_position(slot), (IDLE_TOKEN,))) for slot in span]
        )
        forks, self._forks = self._forks, []
        self._counters.copies += len(forks)
        more: dict[str, Any] = {"copies": (*forks, *copies), "whole_length": self._side.first}
        return planned(filled, self.beams, reads_idle=self._traits.overlaps_steps, **more)
