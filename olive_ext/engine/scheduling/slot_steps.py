"""Steps of sequences in slots: which get one, which rows the next step has, and when a slot is free again.

A step is packed: the rows that decode, and inputs of many sequences up to the chunk size; or it has one row with
several tokens, or several rows with one token each (GroupQueryAttention refuses several tokens behind a past in a
batch). There an input is computed to its end before the next sequence is admitted, and decoding rows wait; short
answers may be fed as those are. Or it has the most rows that are alike, inputs first. Knows no runner, and no step's
output.
"""

from __future__ import annotations

from typing import Any

from olive_ext.engine.requests import Counters
from olive_ext.engine.runners.runner import ONE_SIDE, Capacity, Side, Traits
from olive_ext.engine.scheduling.admission import Admission
from olive_ext.engine.scheduling.beam_group import BeamGroup
from olive_ext.engine.scheduling.next_rows import IDLE_TOKEN, next_rows, together
from olive_ext.engine.scheduling.overlapped_steps import following
from olive_ext.engine.scheduling.planned_step import PlannedStep, planned
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.scheduling.slots import MIN_COPY, MIN_FORK, Slots
from olive_ext.engine.step import UNLIMITED, Batching, Candidates, Copy, Row


class SlotSteps:
    """The sequences that have slots, those that wait for one, and the next step of them."""

    def __init__(
        self,
        traits: Traits,
        capacity: Capacity,
        counters: Counters,
        chunk_size: int,
        answer_tokens: int,
        side: Side = ONE_SIDE,
    ) -> None:
        """As in `Scheduler`; all sequences are on one `side`."""
        self._is_packed = traits.batching is Batching.PACKED
        self._is_alike = traits.batching is Batching.ALIKE
        self.slots = Slots(
            capacity.num_slots,
            capacity.positions,
            traits.can_rewind,
            has_blocks=self._is_packed or self._is_alike,
            keeps_wanted=answer_tokens > 0,
            min_copy=_min_copy(traits.batching, answer_tokens),
            row_group=traits.row_group,
        )
        self._traits = traits
        self._side = side
        self._chunk_size = chunk_size
        self._counters = counters
        self._admission = Admission(self.slots, traits, counters, answer_tokens)
        self._running: dict[int, Sequence] = {}
        self.beams: dict[int, BeamGroup] = {}
        """Beam searches by the slots of their sequences."""

        self._forks: list[Copy] = []
        self.limit = UNLIMITED

    @property
    def has_work(self) -> bool:
        return bool(self._running) or self.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting

    def add(self, sequence: Sequence) -> None:
        self._admission.add(sequence)

    def plan(self) -> PlannedStep:
        """The next step; there is work left."""
        return self._rows_plan(self._admit())

    def followed_by_its_tokens(self, present: PlannedStep) -> PlannedStep | None:
        """A step fed with the tokens that the present one finds; None where other slots would be computed."""
        if not present.finds_next:
            return None
        members = set(present.sequences)
        running = list(self._running.values())
        ready = [s for s in running if (not s.has_ended and s.end < s.room if s in members else s.computed < s.end)]
        is_prompt_due = [s for s in ready if s.end - s.computed > 1 and s not in members]
        has_room = self.slots.has_free or len(ready) < len(running)
        if not ready or is_prompt_due or (has_room and self.num_waiting):
            return None
        chosen = set(together(ready, self._traits, self.limit))
        slots = sorted([sequence.slot for sequence in chosen])
        if not chosen <= members or self._span(slots) != [row.slot for row in present.step.rows]:
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
        """Tokens of inputs in a step."""
        most, group = min(self.limit, self._chunk_size), self._traits.row_group
        return max(group, most - most % group)

    def _admit(self) -> tuple[Copy, ...]:
        """Gives slots to waiting sequences: to as many as fill a packed step, to one where an input is fed alone, or
        else to all short answers, to all where those that are alike share steps."""
        if not self._admission.num_waiting:
            return ()
        inputs = [one for one in self._running.values() if one.computed < one.num_input and not one.is_answer]
        pending = sum([one.end - one.computed for one in inputs])
        takes_many = self._is_packed or self._is_alike
        if pending and not takes_many:
            return ()
        copies: list[Copy] = []
        room = UNLIMITED if self._is_alike else self._most_tokens - pending
        for sequence, copy in self._admission.admit(room, UNLIMITED if takes_many else 1):
            self._running[sequence.slot] = sequence
            if sequence.num_slots > 1:
                beams = BeamGroup(sequence, self.slots, self._admission.wanted)
                self._running |= {one.slot: one for one in beams.members}
                self.beams |= {one.slot: beams for one in beams.members}
            copies += [copy] if copy else []
        return tuple(copies)

    def _rows_plan(self, copies: tuple[Copy, ...]) -> PlannedStep:
        """The next rows, and idle ones where the runner needs them."""
        ready = [one for one in self._running.values() if one.computed < one.end]
        chosen = next_rows(ready, self._traits, self.slots.capacity, self._most_tokens, self.limit)
        rows = {sequence.slot: (sequence, row) for sequence, row in chosen}
        span = self._span(sorted(rows))
        filled = tuple(
            [rows.get(slot) or (None, Row(slot, self.slots.idle_position(slot), (IDLE_TOKEN,))) for slot in span]
        )
        forks, self._forks = self._forks, []
        self._counters.copies += len(forks)
        more: dict[str, Any] = {"copies": (*forks, *copies), "whole_length": self._side.first}
        return planned(filled, self.beams, reads_idle=self._traits.async_decode, **more)

    def _span(self, slots: list[int]) -> list[int]:
        """`slots` and the free ones that must run with them. A sequence that runs alone never has company."""
        if len(slots) == 1 or self._is_packed or self._is_alike:
            return slots
        if self._traits.batching is Batching.POOL:
            return list(range(self.slots.num_slots))
        return list(range(slots[0], slots[-1] + 1))


def _min_copy(batching: Batching, answer_tokens: int) -> int:
    """Positions that a copy between slots must save: a step of its own for a few tokens costs more than a copy."""
    if batching is Batching.ALIKE:
        return 1
    return MIN_FORK if batching is Batching.PACKED or answer_tokens else MIN_COPY
