"""Decides what the next step computes, and takes in its output. Only this module writes to sequences and slots.

If the form scores texts without slots and such texts wait, the step holds these. Otherwise `SlotSteps` plans it. Some
models compute a text otherwise beyond a certain length: sequences on the other side of that length wait until those of
the present side have ended, and reuse nothing. A generation that grows beyond its side begins anew on the next one, as
in transformers and onnxruntime-genai. What a planned step feeds counts as computed at once, so that the next step can
be planned before it has run; its scores and tokens are taken in when it is read. Knows no runner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from olive_ext.engine.requests import Counters
from olive_ext.engine.runners.runner import ReadySequences, ScoredSteps, Traits
from olive_ext.engine.scheduling.planned_step import BeamGroup, PlannedStep, non_finite, planned, put_scores
from olive_ext.engine.scheduling.sequences import ChosenRow, PendingResult, Sequence
from olive_ext.engine.scheduling.slots import Slots
from olive_ext.engine.step import IDLE_TOKEN, ONE_SIDE, Capacity, IntArray, Row, Side, Step, StepOutput


@dataclass(frozen=True)
class Planning:
    """What a scheduler plans steps for, and by."""

    traits: Traits
    capacity: Capacity
    """The traits and the capacity of the runner."""

    counters: Counters
    chunk_size: int
    """The most tokens of inputs in a step."""

    steps: ScoredSteps
    """How scored texts are planned."""

    limit: int
    """The most tokens of a step, unless a single item has more."""

    reports_non_finite: bool
    """As in `StepLoop`."""


class Scheduler:
    """Plans steps, delivers scores and tokens to results."""

    def __init__(self, planning: Planning) -> None:
        self.key = planning.capacity, *planning.steps.sizes
        self._planning = planning
        self._counters = planning.counters
        self._waiting_sides: deque[Sequence] = deque()
        """Sequences of another side than the present one: they wait until all of the present side have ended."""

        self._begin_side(ONE_SIDE)
        self._present: PlannedStep | None = None
        self._overlapped: PlannedStep | None = None
        self._greedy_ids: IntArray = np.zeros(0, np.int64)
        """The greedy tokens of the step that was read last."""

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running."""
        return bool(self.num_waiting or self._in_slots.has_work or self._present)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that no step has begun with."""
        return self._in_slots.waiting.num_waiting + self._num_without_slots + len(self._waiting_sides)

    @property
    def present(self) -> PlannedStep:
        """The step whose output `update` takes next."""
        assert self._present is not None
        return self._present

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences in sorted order."""
        for sequence in sequences:
            if self._waiting_sides or sequence.side != self._side:
                self._waiting_sides.append(sequence)
            else:
                self._place(sequence)

    def schedule(self) -> None:
        """Plans the next step, unless a planned step's output is still to be taken in. Some work must be left."""
        if self._present is not None:
            return
        if self._waiting_sides and not (self._in_slots.has_work or self._num_without_slots):
            self._begin_side(self._waiting_sides[0].side)
        if self._scored is not None and self._scored.waiting:
            chosen, moves, first_cell = self._scored.plan(self._planning.limit, self._counters)
            plan = planned(chosen, {}, moves=moves, first_cell=first_cell, whole_length=self._side.first)
            self._present = self._committed(plan)
        else:
            in_slots = self._in_slots.plan()
            assert in_slots is not None
            self._present = self._committed(in_slots)

    def schedule_overlapped(self) -> Step | None:
        """The step after the present one, begun before the present one is read. None where it must be read first."""
        if not self._planning.traits.overlaps_steps or self._overlapped is not None or self._num_without_slots:
            return None
        self._overlapped = self._in_slots.plan(self.present)
        return None if self._overlapped is None else self._overlapped.step

    def update(self, output: StepOutput) -> list[PendingResult]:
        """Takes in the present step's output. Returns the results that are complete now. May raise `NonFiniteError`."""
        present = self.present
        self._counters.steps += 1
        self._counters.tokens_fed += self._num_fed
        self._counters.rows_dropped += self._num_dropped
        self._counters.idle_rows += present.sequences.count(None)
        refused_at = None if self._planning.reports_non_finite else self._counters.steps
        wrong_T, wrong_K = non_finite(present, output, refused_at)
        completed, num_wrong = put_scores(present, output, wrong_T)
        self._counters.non_finite += num_wrong
        samples = zip(output.sample_logits_KV, wrong_K.tolist(), strict=True)
        candidates = zip(*output.candidates, strict=True)
        num_generated = 0
        greedy = output.greedy_ids.tolist()
        for sequence, number in present.decoding:
            if sequence.has_ended:
                continue
            if sequence.num_slots > 1:
                self._counters.copies += self._in_slots.beams[sequence.slot].advance(sequence, *next(candidates))
                num_generated += sequence.has_ended and len(sequence.result.generated)
            else:
                drawn_from = None
                if sequence.needs_rows:
                    drawn_from, is_wrong = next(samples)
                    self._counters.non_finite += is_wrong and sequence.result.note_non_finite()
                num_generated += sequence.append(greedy[number], drawn_from)
            if sequence.has_ended or sequence.end > sequence.room:  # texts of its side have no more
                self._in_slots.retire(sequence, self._overlapped)
                if not sequence.has_ended:
                    self._waiting_sides.append(sequence.begun_anew(self._planning.traits.side(sequence.end)))
                elif sequence.result.is_complete and sequence.result not in completed:
                    completed.append(sequence.result)
        self._counters.tokens_generated += num_generated
        overlapped, self._overlapped = self._overlapped, None
        self._counters.steps_overlapped += overlapped is not None
        self._greedy_ids = output.greedy_ids
        self._present = None if overlapped is None else self._committed(overlapped)
        return completed

    def _begin_side(self, side: Side) -> None:
        """Drops what is resident, and admits the sequences that wait for `side`."""
        self._side = side
        self._in_slots = SlotSteps(self._planning, side)
        self._scored = self._planning.steps.batches(self._planning.capacity)
        waiting, self._waiting_sides = self._waiting_sides, deque()
        for sequence in waiting:
            if sequence.side == side:
                self._place(sequence)
            else:
                self._waiting_sides.append(sequence)

    def _place(self, sequence: Sequence) -> None:
        if self._scored is not None and sequence.generation is None:
            self._scored.waiting.append(sequence)
        else:
            self._in_slots.waiting.add(sequence)

    @property
    def _num_without_slots(self) -> int:
        return len(self._scored.waiting) if self._scored else 0

    def _committed(self, plan: PlannedStep) -> PlannedStep:
        """Returns `plan`, which runs before any other step: its tokens count as computed and resident from now on."""
        step, columns, is_in_slots = plan.step, plan.step.columns, plan.step.first_cell is None
        fed = [place for place, sequence in enumerate(plan.sequences) if sequence is not None]
        if is_in_slots:
            checkpoints = [row.slot for row in step.rows if row.is_checkpoint]
            tokens_N = columns.tokens_after(step.follows, self._greedy_ids)
            self._in_slots.slots.extend(columns, tokens_N, fed, checkpoints)
        self._num_fed = self._num_dropped = 0
        for sequence, length in zip(plan.sequences, columns.lengths_B.tolist(), strict=True):
            if sequence is None:
                continue
            if sequence.has_ended:  # when the step had begun
                self._num_dropped += 1
                self._in_slots.release(sequence)
                continue
            self._num_fed += length
            computed, end = sequence.computed + length, sequence.end
            sequence.computed = end if computed > end else computed
            if sequence.generation is None and computed >= end and is_in_slots:
                self._in_slots.release(sequence)
        return plan


class SlotSteps:
    """The sequences that have slots, those that wait for one, and the next step of them."""

    def __init__(self, planning: Planning, side: Side) -> None:
        """All sequences are on one `side`."""
        self._traits = planning.traits
        self._form = planning.traits.form
        self._limit = planning.limit
        most, group = min(planning.limit, planning.chunk_size), planning.traits.row_group
        self._most_tokens = max(group, most - most % group)
        self._counters = planning.counters
        self._side = side
        self.slots = Slots(planning.traits, planning.capacity, planning.steps.answer_tokens)
        self.waiting = Admission(self.slots, planning)
        """Sequences without a slot."""

        self._running: dict[int, Sequence] = {}
        self.beams: dict[int, BeamGroup] = {}
        """Beam searches, by the slots of their sequences."""

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running."""
        return bool(self._running) or self.waiting.num_waiting > 0

    def plan(self, before: PlannedStep | None = None) -> PlannedStep | None:
        """The next step. Some work must be left.

        After a step `before` that has not been read, rows that decode are fed with the tokens that it finds. Two kinds
        of sequences are not in such a step: those whose next token the host chooses (the step then has inputs, or only
        rows that decode together), and those whose next token is forced, which happens to few at a time. None where
        nothing can be computed until `before` is read.
        """
        expected, is_complete = self._expected(before) if before is not None else ({}, True)
        self._admit()
        while True:
            ready = [sequence for sequence in self._running.values() if sequence.computed < sequence.end]
            if not ready or not (is_complete or [sequence for sequence in ready if not sequence.is_input_computed]):
                return None
            self._close_gaps()
            chosen = self._rows(ready)
            if self.slots.make_room([row for _, row in chosen], self.waiting.wanted):
                copies, self.slots.copies = tuple(self.slots.copies), []
                follows = tuple([expected.get(sequence, -1) for sequence, _ in chosen]) if expected else ()
                more: dict[str, Any] = {"copies": copies, "whole_length": self._side.first, "follows": follows}
                return planned(chosen, self.beams, **more)
            if before is not None:
                return None
            # The sequence that came last is preempted: its blocks become free, and it is computed again later.
            last = next(sequence for sequence in reversed([*self._running.values()]) if sequence.num_slots == 1)
            self.release(last)
            self.waiting.put_back(last)
            self._counters.preemptions += 1

    def _expected(self, before: PlannedStep) -> tuple[dict[Sequence | None, int], bool]:
        """The sequences whose next token that step finds, each with its logits row, and whether these are all that
        continue. The slot of a sequence whose last token is found becomes free."""
        expected: dict[Sequence | None, int] = {}
        is_complete = True
        for sequence, number in before.decoding:
            if sequence.has_ended:
                continue
            if sequence.end == len(sequence.tokens) and sequence.num_slots == 1:
                self.release(sequence)
            elif sequence.needs_rows or sequence.num_slots > 1:
                is_complete = False
            elif sequence.end < sequence.room and sequence.expect():
                expected[sequence] = number
        return expected, is_complete

    def retire(self, sequence: Sequence, overlapped: PlannedStep | None) -> None:
        """Frees the slot of a generation that is complete, unless a step that has begun still writes there."""
        for member in self.beams[sequence.slot].members if sequence.num_slots > 1 else (sequence,):
            is_running = self._running.get(member.slot) is member
            if is_running and (overlapped is None or member not in overlapped.sequences):
                self.release(member)

    def release(self, sequence: Sequence) -> None:
        """Frees the sequence's slot."""
        del self._running[sequence.slot]
        self.beams.pop(sequence.slot, None)
        self.slots.release(sequence.slot)

    def _admit(self) -> None:
        """Gives slots to waiting sequences: to as many as form and blocks have room for, and to short answers."""
        if not (self.waiting.num_waiting and self.slots.free):
            return
        running = self._running.values()
        inputs = [sequence for sequence in running if sequence.computed < sequence.num_input and not sequence.is_short]
        room, most = self._form.room(self._most_tokens, sum([sequence.end - sequence.computed for sequence in inputs]))
        blocks_due = sum([self.slots.blocks_due(sequence) for sequence in running])
        for sequence in self.waiting.admit(room, most, blocks_due):
            self._running[sequence.slot] = sequence
            if sequence.num_slots > 1:
                beams = BeamGroup(sequence, self.slots, self.waiting.wanted)
                self._running |= {member.slot: member for member in beams.members}
                self.beams |= {member.slot: beams for member in beams.members}

    def _close_gaps(self) -> None:
        """Moves the last sequences that decode into free slots between the others, where no sequence waits for a slot:
        a copy costs about as much as an idle row, and every step would have that row. Not where steps overlap, because
        such devices run many rows at once."""
        if not self._form.spans_slots or self._traits.overlaps_steps or self.waiting.num_waiting or self.beams:
            return
        if not all(sequence.is_input_computed for sequence in self._running.values()):
            return
        taken = sorted(self._running)
        for target in [slot for slot in range(taken[0], taken[-1]) if slot in self.slots.free]:
            source = taken.pop()
            if source < target:
                return
            sequence = self._running.pop(source)
            self.slots.move(source, target)
            sequence.slot, self._running[target] = target, sequence
            self._counters.copies += 1

    def _rows(self, ready: list[Sequence]) -> list[ChosenRow]:
        """The next rows in the order of their slots, with idle rows where the runner needs them."""
        limits = self._most_tokens, self._limit, self.slots.capacity
        chosen = self._form.next_rows(ReadySequences(ready, *limits, self._traits))
        rows = {row.slot: (sequence, row) for sequence, row in chosen}
        span = self._form.slots_of(sorted(rows), self.slots.num_slots)
        idle = (Row(slot, self.slots.idle_position(slot), (IDLE_TOKEN,)) for slot in span if slot not in rows)
        rows |= {row.slot: (None, row) for row in idle}
        return [rows[slot] for slot in span]


LOOK_AHEAD = 256
"""The number of waiting sequences that are searched for one that need not wait longer."""


class Admission:
    """Gives slots to waiting sequences, in sorted order, as far as a step has room.

    Where a step takes many of them, a sequence is passed over while an earlier one is about to compute the prefix that
    both share. Where a step takes one input or many short answers, inputs come first, until as many answers as there
    are slots wait only for such inputs.
    """

    def __init__(self, slots: Slots, planning: Planning) -> None:
        self._slots = slots
        self._traits = planning.traits
        self._counters = planning.counters
        self._answer_tokens = planning.steps.answer_tokens
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
        is_answer = self._is_short(sequence, sequence.num_shared, self._answer_tokens)
        (self._answers if is_answer else self._inputs).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Takes a preempted sequence: it comes before all others."""
        if self._last.get(sequence.slot) is sequence:
            del self._last[sequence.slot]
            self.wanted.discard(sequence.slot)
        sequence.give_up()
        self._inputs.appendleft(sequence)

    def admit(self, room: int, most: int, blocks_due: int = 0) -> Iterator[Sequence]:
        """Admits up to `most` inputs while the next step has `room` for their tokens, and any number of short answers.
        Each gets a slot, to which the prefix that it shares is copied. `blocks_due`: the blocks that running sequences
        will still take."""
        while room > 0 and most > 0 and self._slots.free and (sequence := self._next()) is not None:
            blocks_due += self._slots.blocks_due(sequence)
            is_idle = self._slots.is_idle
            has_room = self._slots.reclaim(partial(int, blocks_due), self.wanted, spares=not is_idle)
            if not has_room and not is_idle:
                self._inputs.appendleft(sequence)
                return
            likely = 0
            if (parent := sequence.parent) is not None:
                parent.num_children -= 1
                if self._last.get(parent.slot) is parent:
                    likely = parent.slot
                    if not parent.num_children:
                        self.wanted.remove(parent.slot)
            self._counters.copies += self._slots.take(sequence, self._most_shared(sequence), self.wanted, likely)
            self._last[sequence.slot] = sequence
            change = self.wanted.add if sequence.num_children else self.wanted.discard
            change(sequence.slot)
            self._counters.prefix_hits += sequence.computed > 0
            self._counters.tokens_reused += sequence.computed
            most_fed = self._answer_tokens and self._answer_tokens + self._slots.min_copy - 1
            sequence.is_short = self._is_short(sequence, sequence.computed, most_fed)
            if not sequence.is_short:
                room -= sequence.end - sequence.computed
                most -= 1
            yield sequence

    @staticmethod
    def _is_short(sequence: Sequence, num_shared: int, most: int) -> bool:
        """Whether it is text with up to `most` tokens after those that it shares: it is fed one token a step."""
        is_text = not sequence.media or sequence.media[-1].stop <= num_shared
        return sequence.generation is None and sequence.end - num_shared <= most and is_text

    def _most_shared(self, sequence: Sequence) -> int:
        """Tokens that need not be fed again: only those whose distributions are not read. Of a prompt, a group of rows
        is left to feed; of a scored text, one."""
        if not self._traits.chunked_prefill:
            return 0
        group = self._traits.row_group if sequence.generation is not None else 1
        return max(0, sequence.first_read() + 1 - group)

    def _next(self) -> Sequence | None:
        """Removes and returns the first sequence that need not wait for a prefix, nor for a slot. While anything else
        runs, a slot whose content waiting sequences share is not overwritten, and at most half of the slots may hold
        such content."""
        is_idle = self._slots.is_idle
        sequence = self._take_out(self.wanted) if self._answers or not is_idle else None
        return self._take_out(set()) if sequence is None and is_idle else sequence

    def _take_out(self, wanted: set[int]) -> Sequence | None:
        """The first sequence that need not wait for a prefix, nor for a slot that is not `wanted`."""
        num_free = len(self._slots.free) - sum([slot in self._slots.free for slot in wanted])
        kinds = [(self._inputs, 1 if self._answers else LOOK_AHEAD), (self._answers, LOOK_AHEAD)]
        if self._answers and sum([last.num_children for last in self._last.values()]) >= num_free:
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

    def _has_slot(self, sequence: Sequence, wanted: set[int], num_free: int) -> bool:
        """Whether a slot may be overwritten: a free one, not `wanted`, or that of a parent whose last child this is."""
        parent, num_wanted = sequence.parent, len(wanted)
        if parent is not None and parent.num_children == 1 and self._last.get(parent.slot) is parent:
            is_wanted = parent.slot in wanted
            num_wanted -= is_wanted
            num_free += is_wanted and parent.slot in self._slots.free
        is_kept = not sequence.num_children or 2 * num_wanted < self._slots.num_slots
        return is_kept and num_free >= sequence.num_slots

    def _is_prefix_due(self, sequence: Sequence) -> bool:
        """Whether an earlier sequence will compute so much of this sequence's tokens that waiting for it pays."""
        parent = sequence.parent
        if parent is None or parent.computed >= sequence.num_shared:
            return False
        is_waiting = parent.slot < 0 and not parent.computed
        return is_waiting or sequence.num_shared - parent.num_shared >= self._slots.min_copy
