"""Decides what the next step computes and takes in its output. The only writer of sequences and slots.

A step is a tree batch, where the runner takes these and there is something to score; or it is packed: the rows that
decode, and inputs of many sequences up to the chunk size; or it has one row with several tokens, or several rows with
one token each (GroupQueryAttention refuses several tokens behind a past in a batch). There an input is computed to its
end before the next sequence is admitted, and decoding rows wait; short answers may be fed as those are. Or it has the
most rows that are alike, inputs first.

What a planned step feeds counts as computed at once, so that the next step can be planned before it has run; its scores
and tokens are taken in when it is read. Knows no runner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from olive_ext.engine.requests import Counters
from olive_ext.engine.runners.runner import Capacity, Traits
from olive_ext.engine.scheduling.admission import Admission
from olive_ext.engine.scheduling.beam_group import BeamGroup
from olive_ext.engine.scheduling.finite import NonFinite
from olive_ext.engine.scheduling.next_rows import IDLE_TOKEN, next_rows, together
from olive_ext.engine.scheduling.overlapped_steps import following, with_tokens
from olive_ext.engine.scheduling.planned_step import PlannedStep, planned
from olive_ext.engine.scheduling.scores import put_scores
from olive_ext.engine.scheduling.sequences import Answer, Sequence
from olive_ext.engine.scheduling.slots import MIN_COPY, MIN_FORK, Slots
from olive_ext.engine.scheduling.tree_batch import TreeBatches
from olive_ext.engine.step import UNLIMITED, Batching, Candidates, Copy, IntArray, Row, Step, StepOutput


class Scheduler:
    """Admits sequences to slots, plans steps, delivers scores and tokens to answers."""

    def __init__(
        self,
        traits: Traits,
        capacity: Capacity,
        counters: Counters,
        chunk_size: int,
        tree_batch_tokens: int = 0,
        answer_tokens: int = 0,
    ) -> None:
        """Plans for a runner with these traits and this capacity. `tree_batch_tokens`: tokens of a tree batch; 0
        computes scored sequences in slots, too. `answer_tokens`: the most of a text, behind what it shares, that is fed
        one token a step. `limit` may be set to fewer tokens of any step, `reports_non_finite` to count such requests
        instead of raising an error."""
        self.form = capacity, tree_batch_tokens, answer_tokens
        self.tree_batch_tokens = tree_batch_tokens
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
            whole_items=traits.whole_items,
        )
        self._traits = traits
        self._chunk_size = chunk_size
        self._counters = counters
        self._admission = Admission(self.slots, traits, counters, answer_tokens)
        self._running: dict[int, Sequence] = {}
        self._beams: dict[int, BeamGroup] = {}
        self._forks: list[Copy] = []
        self._tree_batches = TreeBatches(capacity.cells) if tree_batch_tokens else None
        self.limit = UNLIMITED
        self.reports_non_finite = False
        self._present: PlannedStep | None = None
        self._overlapped: PlannedStep | None = None
        self._found: IntArray = np.zeros(0, np.int64)
        """The greedy tokens of the step that was read last."""

    @property
    def has_work(self) -> bool:
        return bool(self.num_waiting or self._running or self._present)

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting + self._num_scored_in_trees

    @property
    def is_planned(self) -> bool:
        """Whether there is a step whose output is to be taken in before another one is planned."""
        return self._present is not None

    @property
    def present(self) -> Step:
        """The step whose output `update` takes next."""
        step = self._present_plan().step
        return with_tokens(step, self._found) if step.uses_previous_tokens else step

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences in sorted order."""
        for sequence in sequences:
            if self._tree_batches is not None and sequence.generation is None:
                self._tree_batches.add(sequence)
            else:
                self._admission.add(sequence)

    def schedule(self) -> Step:
        """The next step; there is work left, and no step is planned."""
        if self._tree_batches is not None and self._tree_batches.num_waiting:
            self._present = self._committed(self._tree_batch_plan(self._tree_batches))
        else:
            copies = self._admit()
            self._present = self._committed(self._slots_plan(copies))
        return self.present

    def schedule_overlapped(self) -> Step | None:
        """The step behind the present one, which begins before that is read. None where that must be read first."""
        if not self._traits.async_decode or self._overlapped is not None or self._num_scored_in_trees:
            return None
        present = self._present_plan()
        self._overlapped = self._followed_by_its_tokens(present) or self._followed_by_inputs()
        return None if self._overlapped is None else self._overlapped.step

    def _followed_by_its_tokens(self, present: PlannedStep) -> PlannedStep | None:
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

    def _followed_by_inputs(self) -> PlannedStep | None:
        """A step that computes inputs, of which the present one finds nothing; sequences that wait for a token of that
        are not in it. None where no input is left: then those that decode stay together."""
        copies = self._admit()
        if all(not sequence.pending or sequence.is_input_computed for sequence in self._running.values()):
            return None
        return self._slots_plan(copies)

    def update(self, output: StepOutput) -> list[Answer]:
        """Takes in the present step's output; returns the answers that are now complete. Raises `NonFiniteError`,
        unless such answers are to be reported."""
        present = self._present_plan()
        self._counters.steps += 1
        wrong = NonFinite.of(output)
        if not self.reports_non_finite:
            wrong.refuse(present, output, self._counters.steps)
        completed, num_wrong = put_scores(present, output, wrong)
        self._counters.non_finite += num_wrong
        samples = zip(output.sample_logits_KV, wrong.samples_K.tolist(), strict=True)
        candidates = iter(output.candidates.rows())
        for reading, best in zip(present.readings, output.greedy_ids.tolist(), strict=True):
            sequence = reading.sequence
            if not reading.is_next or sequence is None or sequence.has_ended:
                continue
            if sequence.slot in self._beams:
                self._advance_beams(self._beams[sequence.slot], sequence, next(candidates))
            else:
                drawn_from, is_wrong = next(samples) if sequence.needs_rows else (None, False)
                self._counters.non_finite += is_wrong and sequence.note_non_finite()
                self._counters.tokens_generated += sequence.append(best, drawn_from)
            if sequence.has_ended:
                self._retire(sequence, completed)
        overlapped, self._overlapped = self._overlapped, None
        self._counters.steps_ahead += overlapped is not None
        self._found = output.greedy_ids
        self._present = None if overlapped is None else self._committed(overlapped)
        return completed

    def _advance_beams(self, beams: BeamGroup, sequence: Sequence, found: Candidates) -> None:
        """Takes in what may follow one of the sequences; forks are made before the next step of slots."""
        beams.put(sequence, found)
        self._forks += beams.advance()
        if sequence.answer is not None and sequence.has_ended:
            self._counters.tokens_generated += len(sequence.answer.generated)

    def _present_plan(self) -> PlannedStep:
        assert self._present is not None
        return self._present

    @property
    def _num_scored_in_trees(self) -> int:
        return self._tree_batches.num_waiting if self._tree_batches else 0

    @property
    def _most_tokens(self) -> int:
        """Tokens of inputs in a step."""
        most, group = min(self.limit, self._chunk_size), self._traits.row_group
        return max(group, most - most % group)

    def _committed(self, planned: PlannedStep) -> PlannedStep:
        """`planned`, which is to be run before any other step: what it feeds counts as computed and resident."""
        step = planned.step
        fed = [pair for pair in zip(step.rows, planned.sequences, strict=True) if pair[1] is not None]
        self._counters.idle_rows += len(step.rows) - len(fed)
        if step.uses_previous_tokens:
            found = zip(step.rows, planned.sequences, self._found.tolist(), strict=True)
            self.slots.extend([(row, (token,)) for row, sequence, token in found if sequence is not None])
        elif step.first_cell is None:
            self.slots.extend([(row, row.tokens) for row, _ in fed])
        for row, sequence in fed:
            assert sequence is not None
            if sequence.has_ended:  # when the step had begun
                self._counters.rows_dropped += 1
                self._release(sequence)
                continue
            length = len(row.tokens)
            self._counters.tokens_fed += length
            end = sequence.end
            sequence.computed = end if sequence.computed + length > end else sequence.computed + length
            if sequence.generation is None and sequence.computed == end and step.first_cell is None:
                self._release(sequence)
        return planned

    def _tree_batch_plan(self, batches: TreeBatches) -> PlannedStep:
        batch = batches.plan(min(self.limit, self.tree_batch_tokens))
        self._counters.prefix_hits += sum(shared > 0 for shared in batch.shared)
        self._counters.tokens_reused += sum(batch.shared)
        self._counters.moves += len(batch.moves)
        return self._plan(batch.rows, moves=batch.moves, first_cell=batch.first_cell)

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
                self._beams |= {one.slot: beams for one in beams.members}
            copies += [copy] if copy else []
        return tuple(copies)

    def _slots_plan(self, copies: tuple[Copy, ...]) -> PlannedStep:
        """The next rows, and idle ones where the runner needs them."""
        ready = [one for one in self._running.values() if one.computed < one.end]
        chosen = next_rows(ready, self._traits, self.slots.capacity, self._most_tokens, self.limit)
        rows = {sequence.slot: (sequence, row) for sequence, row in chosen}
        span = self._span(sorted(rows))
        filled = [rows.get(slot) or (None, Row(slot, self.slots.idle_position(slot), (IDLE_TOKEN,))) for slot in span]
        forks, self._forks = self._forks, []
        self._counters.copies += len(forks)
        return self._plan(filled, copies=(*forks, *copies))

    def _plan(self, rows: Iterable[tuple[Sequence | None, Row]], **more: Any) -> PlannedStep:
        return planned(tuple(rows), self._beams, reads_idle=self._traits.async_decode, **more)

    def _span(self, slots: list[int]) -> list[int]:
        """`slots` and the free ones that must run with them. A sequence that runs alone never has company."""
        if len(slots) == 1 or self._is_packed or self._is_alike:
            return slots
        if self._traits.batching is Batching.POOL:
            return list(range(self.slots.num_slots))
        return list(range(slots[0], slots[-1] + 1))

    def _retire(self, sequence: Sequence, completed: list[Answer]) -> None:
        """The slot of a generation that is complete is free, unless a step that has begun still writes there."""
        beams = self._beams.get(sequence.slot)
        for one in [sequence] if beams is None else beams.members:
            if self._overlapped is None or one not in self._overlapped.sequences:
                self._release(one)
        if sequence.answer is not None and sequence.answer.is_complete and sequence.answer not in completed:
            completed.append(sequence.answer)

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.slot]
        self._beams.pop(sequence.slot, None)
        self.slots.release(sequence.slot)


def _min_copy(batching: Batching, answer_tokens: int) -> int:
    """Positions that a copy between slots must save: a step of its own for a few tokens costs more than a copy."""
    if batching is Batching.ALIKE:
        return 1
    return MIN_FORK if batching is Batching.PACKED or answer_tokens else MIN_COPY
