"""Decides what the next step computes and takes in its output. The only writer of sequences and slots.

A step has scored texts without slots, where the runner's form has such and there is something to score; else
`SlotSteps` makes it.
Sequences on other sides of a length behind which the model computes texts otherwise wait until those of the present
side have ended, and find nothing resident; a generation that grows beyond its side begins anew on the next one, as in
transformers and onnxruntime-genai.

What a planned step feeds counts as computed at once, so that the next step can be planned before it has run; its scores
and tokens are taken in when it is read. Knows no runner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from olive_ext.engine.capacity import UNLIMITED, Capacity
from olive_ext.engine.forms.base import ScoredBatches, ScoredSteps
from olive_ext.engine.requests import Counters
from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.overlapped_steps import with_tokens
from olive_ext.engine.scheduling.planned_step import NonFinite, PlannedStep, planned, put_scores
from olive_ext.engine.scheduling.sequences import PendingAnswer, Sequence
from olive_ext.engine.scheduling.slot_steps import SlotSteps
from olive_ext.engine.step import ONE_SIDE, IntArray, Side, Step, StepOutput


class Scheduler:
    """Plans steps, delivers scores and tokens to answers."""

    def __init__(
        self, traits: Traits, capacity: Capacity, counters: Counters, chunk_size: int, steps: ScoredSteps
    ) -> None:
        """Plans for a runner with these traits and this capacity, and scored texts as `steps` have it.
        `reports_non_finite` may be set to count such requests instead of raising an error."""
        self.key = capacity, *steps.sizes
        self._traits, self._capacity, self._steps = traits, capacity, steps
        self._sizes = chunk_size, steps.answer_tokens
        self._counters = counters
        self._limit = UNLIMITED
        self._waiting_sides: deque[Sequence] = deque()
        """Sequences that wait for another side than the present one to have ended, or behind such."""

        self._begin_side(ONE_SIDE)
        self.reports_non_finite = False
        self._present: PlannedStep | None = None
        self._overlapped: PlannedStep | None = None
        self._found: IntArray = np.zeros(0, np.int64)
        """The greedy tokens of the step that was read last."""

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running."""
        return bool(self.num_waiting or self._in_slots.has_work or self._present)

    @property
    def num_waiting(self) -> int:
        """Sequences that no step has begun with."""
        return self._in_slots.waiting.num_waiting + self._num_without_slots + len(self._waiting_sides)

    @property
    def is_planned(self) -> bool:
        """Whether there is a step whose output is to be taken in before another one is planned."""
        return self._present is not None

    @property
    def present(self) -> Step:
        """The step whose output `update` takes next."""
        step = self._present_plan().step
        return with_tokens(step, self._found) if step.follows else step

    def cut_steps(self, num_tokens: int) -> None:
        """No step has more tokens from now on, but for an item of more."""
        self._limit = self._in_slots.limit = num_tokens

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences in sorted order."""
        for sequence in sequences:
            if self._waiting_sides or sequence.side != self._side:
                self._waiting_sides.append(sequence)
            else:
                self._place(sequence)

    def schedule(self) -> Step:
        """The next step; there is work left, and no step is planned."""
        if self._waiting_sides and not (self._in_slots.has_work or self._num_without_slots):
            self._begin_side(self._waiting_sides[0].side)
        if self._scored is not None and self._scored.num_waiting:
            self._present = self._committed(self._scored_plan(self._scored))
        else:
            plan = self._in_slots.plan()
            assert plan is not None
            self._present = self._committed(plan)
        return self.present

    def schedule_overlapped(self) -> Step | None:
        """The step behind the present one, which begins before that is read. None where that must be read first."""
        if not self._traits.overlaps_steps or self._overlapped is not None or self._num_without_slots:
            return None
        self._overlapped = self._in_slots.plan(self._present_plan())
        return None if self._overlapped is None else self._overlapped.step

    def update(self, output: StepOutput) -> list[PendingAnswer]:
        """Takes in the present step's output; the answers that are complete now. May raise `NonFiniteError`."""
        present = self._present_plan()
        self._counters.steps += 1
        wrong = NonFinite.of(output)
        if not self.reports_non_finite:
            wrong.refuse(present, output, self._counters.steps)
        completed, num_wrong = put_scores(present, output, wrong)
        self._counters.non_finite += num_wrong
        samples = zip(output.sample_logits_KV, wrong.samples_K.tolist(), strict=True)
        candidates = iter(output.candidates.rows())
        num_generated = 0
        for (sequence, _, is_next), best in zip(present.readings, output.greedy_ids.tolist(), strict=True):
            if not is_next or sequence.has_ended:
                continue
            if sequence.num_slots > 1:
                self._in_slots.advance_beams(sequence, next(candidates))
            else:
                drawn_from = None
                if sequence.needs_rows:
                    drawn_from, is_wrong = next(samples)
                    self._counters.non_finite += is_wrong and sequence.note_non_finite()
                num_generated += sequence.append(best, drawn_from)
            if sequence.has_ended or sequence.end > sequence.room:  # texts of its side have no more
                self._in_slots.retire(sequence, self._overlapped)
                if not sequence.has_ended:
                    self._waiting_sides.append(sequence.begun_anew(self._traits.side(sequence.end)))
                elif sequence.answer is not None and sequence.answer.is_complete and sequence.answer not in completed:
                    completed.append(sequence.answer)
        self._counters.tokens_generated += num_generated
        overlapped, self._overlapped = self._overlapped, None
        self._counters.steps_ahead += overlapped is not None
        self._found = output.greedy_ids
        self._present = None if overlapped is None else self._committed(overlapped)
        return completed

    def _begin_side(self, side: Side) -> None:
        """Forgets what is resident, and places the sequences that wait for `side`."""
        self._side = side
        self._in_slots = SlotSteps(self._traits, self._capacity, self._counters, *self._sizes, side)
        self._in_slots.limit = self._limit
        self._scored = self._steps.batches(self._capacity)
        waiting, self._waiting_sides = self._waiting_sides, deque()
        for sequence in waiting:
            if sequence.side == side:
                self._place(sequence)
            else:
                self._waiting_sides.append(sequence)

    def _place(self, sequence: Sequence) -> None:
        if self._scored is not None and sequence.generation is None:
            self._scored.add(sequence)
        else:
            self._in_slots.waiting.add(sequence)

    def _present_plan(self) -> PlannedStep:
        assert self._present is not None
        return self._present

    @property
    def _num_without_slots(self) -> int:
        return self._scored.num_waiting if self._scored else 0

    def _committed(self, plan: PlannedStep) -> PlannedStep:
        """`plan`, which is to be run before any other step: what it feeds counts as computed and resident."""
        step, columns, is_in_slots = plan.step, plan.step.columns, plan.step.first_cell is None
        fed = [place for place, sequence in enumerate(plan.sequences) if sequence is not None]
        self._counters.idle_rows += len(step.rows) - len(fed)
        if is_in_slots:
            checkpoints = [row.slot for row in step.other_rows if row.is_checkpoint]
            tokens_N = columns.tokens_behind(step.follows, self._found)
            self._in_slots.slots.extend(columns, tokens_N, fed, checkpoints)
        num_fed = 0
        for sequence, length in zip(plan.sequences, columns.lengths_B.tolist(), strict=True):
            if sequence is None:
                continue
            if sequence.has_ended:  # when the step had begun
                self._counters.rows_dropped += 1
                self._in_slots.release(sequence)
                continue
            num_fed += length
            computed, end = sequence.computed + length, sequence.end
            sequence.computed = end if computed > end else computed
            if sequence.generation is None and computed >= end and is_in_slots:
                self._in_slots.release(sequence)
        self._counters.tokens_fed += num_fed
        return plan

    def _scored_plan(self, batches: ScoredBatches) -> PlannedStep:
        batch = batches.plan(self._in_slots.limit)
        self._counters.prefix_hits += sum(shared > 0 for shared in batch.shared)
        self._counters.tokens_reused += sum(batch.shared)
        self._counters.moves += len(batch.moves)
        more: dict[str, Any] = {"moves": batch.moves, "first_cell": batch.first_cell, "whole_length": self._side.first}
        return planned(batch.chosen, {}, **more)
