"""Decides what the next step computes and takes in its output. The only writer of sequences and slots.

A step is a tree batch, where the runner takes these and there is something to score; or one row with several tokens,
or several rows with one token each (GroupQueryAttention refuses several tokens behind a past in a batch). In slots an
input is computed to its end before the next sequence is admitted; decoding rows wait. Knows no runner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import replace

from olive_ext.engine.requests import Counters, FinishReason, source_key
from olive_ext.engine.runners.runner import Capacity, Traits
from olive_ext.engine.scheduling.finite import refuse_non_finite
from olive_ext.engine.scheduling.overlapped_steps import PlannedStep, can_be_followed, following, goes_on, with_tokens
from olive_ext.engine.scheduling.sequences import Answer, Sequence
from olive_ext.engine.scheduling.slots import Slots
from olive_ext.engine.scheduling.tree_batch import TreeBatches
from olive_ext.engine.step import UNLIMITED, Batching, Copy, LogitsRow, Row, Step, StepOutput

IDLE_TOKEN = 0


class Scheduler:
    """Admits sequences to slots, plans steps, delivers scores and tokens to answers."""

    def __init__(
        self, traits: Traits, capacity: Capacity, counters: Counters, chunk_size: int, tree_batch_tokens: int = 0
    ) -> None:
        """Plans for a runner with these traits and this capacity. `tree_batch_tokens`: tokens of a tree batch; 0
        computes scored sequences in slots, too. `limit` may be set to fewer tokens of any step."""
        self.capacity = capacity
        self.tree_batch_tokens = tree_batch_tokens
        self.slots = Slots(capacity.num_slots, capacity.positions, traits.can_rewind)
        self._traits = traits
        self._chunk_size = chunk_size
        self._counters = counters
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._tree_batches = TreeBatches(capacity.cells) if tree_batch_tokens else None
        self.limit = UNLIMITED
        self._present: PlannedStep | None = None
        self._overlapped: PlannedStep | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.num_waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + (self._tree_batches.num_waiting if self._tree_batches else 0)

    @property
    def present(self) -> Step:
        """The step whose output `update` takes next."""
        return self._present_plan().step

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences in sorted order."""
        for sequence in sequences:
            if self._tree_batches is not None and sequence.generation is None:
                self._tree_batches.add(sequence)
            else:
                self._waiting.append(sequence)

    def schedule(self) -> Step:
        """The next step; there is work left."""
        if self._tree_batches is not None and self._tree_batches.num_waiting:
            self._present = self._tree_batch_plan(self._tree_batches)
            return self.present
        copies = self._admit()
        ready = list(self._running.values())
        prefill = next((sequence for sequence in ready if sequence.pending > 1), None)
        if self._traits.batching is Batching.ALIKE:
            ready = self._alike([(s, s.computed, len(self._row(s).tokens)) for s in ready])
        elif self._traits.batching is not Batching.PACKED and prefill:
            ready = [prefill]
        self._present = self._slots_plan(self._together(ready), copies)
        return self.present

    def schedule_overlapped(self) -> Step | None:
        """The step behind the present one, whose tokens that one finds. None where that must be read first, or where
        other slots would be computed."""
        present = self._present_plan()
        if not self._traits.async_decode or self._overlapped is not None or not can_be_followed(present):
            return None
        running = self._running.values()
        ready = [s for s in running if (goes_on(s) if present.has(s) else s.pending)]
        is_prompt_due = any(s.pending > 1 for s in ready if not present.has(s))
        has_room = self.slots.has_free or len(ready) < len(running)
        is_scoring_due = self._tree_batches is not None and self._tree_batches.num_waiting
        if not ready or is_prompt_due or is_scoring_due or (self._waiting and has_room):
            return None
        if self._traits.batching is Batching.ALIKE:
            fed = {id(s): len(row.tokens) for row, s in zip(present.step.rows, present.sequences, strict=True)}
            ready = self._alike([(s, s.computed + fed.get(id(s), 0), 1) for s in ready])
        chosen = self._together(ready)
        slots = sorted(sequence.slot for sequence in chosen)
        is_same = self._span(slots) == [row.slot for row in present.step.rows]
        if not is_same or not all(present.has(sequence) for sequence in chosen):
            return None
        self._overlapped = following(present, slots, self.slots.capacity)
        return self._overlapped.step

    def drop_overlapped(self) -> None:
        """Forgets the overlapped step, which has not been run."""
        self._overlapped = None

    def update(self, output: StepOutput) -> list[Answer]:
        """Takes in the present step's output; returns the answers that are now complete. Raises `NonFiniteError`."""
        present = self._present_plan()
        step = present.step
        self._counters.steps += 1
        refuse_non_finite(present, output, self._counters.steps)
        completed: list[Answer] = []
        targets = enumerate(zip(step.targets, output.target_logprobs.tolist(), strict=True))
        samples = iter(output.sample_logits_KV)
        greedy = iter(output.greedy_ids.tolist())
        read_rows = {found.row for found in step.logits_rows}
        for place, (row, sequence) in enumerate(zip(step.rows, present.sequences, strict=True)):
            if sequence is None or not sequence.pending:
                self._pass_over(row, sequence)
                if place in read_rows:
                    next(greedy)  # nobody reads it
                continue
            self._counters.tokens_fed += len(row.tokens)
            for position in _read_positions(sequence, row):
                best = next(greedy)
                for read in sequence.reads.get(position, ()):
                    number, ((_, token), logprob) = next(targets)
                    note = None if output.notes_T is None else output.notes_T[number : number + 1]
                    read.answer.put_score(read.target, logprob, best == token, note)
                    if read.answer.is_complete:
                        completed.append(read.answer)
                if sequence.wants_next(position):
                    self._append(sequence, best if sequence.rng is None else sequence.draw(next(samples)))
            sequence.computed += len(row.tokens)
            if row.cells_P is None:
                self.slots.extend(row.slot, row.tokens, row.is_checkpoint)
                self._retire(sequence, completed)
        self._counters.steps_ahead += self._overlapped is not None
        self._present = None if self._overlapped is None else with_tokens(self._overlapped, output.greedy_ids)
        self._overlapped = None
        return completed

    def _present_plan(self) -> PlannedStep:
        assert self._present is not None
        return self._present

    def _together(self, ready: list[Sequence]) -> list[Sequence]:
        """The sequences of `ready` that share the next step."""
        return ready[: 1 if self._traits.batching is Batching.SINGLE else self.limit]

    def _alike(self, ready: Iterable[tuple[Sequence, int, int]]) -> list[Sequence]:
        """The most sequences whose rows, of (past, number of tokens), may share a step. Inputs come first."""
        groups: dict[Hashable, list[Sequence]] = {}
        for sequence, past, num_tokens in ready:
            group = self._traits.row_mix.group(past, num_tokens, sequence.source)
            groups.setdefault((sequence.slot,) if group is None else group, []).append(sequence)
        inputs = [group for group in groups.values() if any(sequence.pending > 1 for sequence in group)]
        return max(inputs or groups.values(), key=len)

    def _pass_over(self, row: Row, sequence: Sequence | None) -> None:
        """An idle row, or that of a sequence that ended when the step had begun: what it was fed is in its slot."""
        if sequence is None:
            self._counters.idle_rows += 1
            return
        self._counters.rows_dropped += 1
        self.slots.extend(row.slot, row.tokens)
        self._release(sequence)

    def _tree_batch_plan(self, batches: TreeBatches) -> PlannedStep:
        planned = batches.plan(min(self.limit, self.tree_batch_tokens))
        self._counters.prefix_hits += sum(shared > 0 for shared in planned.shared)
        self._counters.tokens_reused += sum(planned.shared)
        self._counters.moves += len(planned.moves)
        plan = self._plan(planned.rows)
        return replace(plan, step=replace(plan.step, moves=planned.moves, first_cell=planned.first_cell))

    def _admit(self) -> tuple[Copy, ...]:
        """Gives slots to waiting sequences: to one, or to all that share nothing where rows that are alike run
        together."""
        copies: list[Copy] = []
        is_alike = self._traits.batching is Batching.ALIKE
        has_inputs = any(not sequence.is_input_computed for sequence in self._running.values())
        while self._waiting and self.slots.has_free:
            if has_inputs and not (is_alike and not self._waiting[0].num_shared):
                break
            copies.extend(self._take(self._waiting.popleft()))
            has_inputs = True
        return tuple(copies)

    def _take(self, sequence: Sequence) -> tuple[Copy, ...]:
        """A slot for `sequence`."""
        taken = self.slots.take(
            sequence.tokens, sequence.first_read() if self._traits.chunked_prefill else 0, source_key(sequence.source)
        )
        sequence.slot, sequence.computed = taken.slot, taken.shared
        self._running[taken.slot] = sequence
        self._counters.prefix_hits += taken.shared > 0
        self._counters.tokens_reused += taken.shared
        self._counters.copies += taken.copy is not None
        return (taken.copy,) if taken.copy else ()

    def _slots_plan(self, sequences: list[Sequence], copies: tuple[Copy, ...]) -> PlannedStep:
        """One row for each of `sequences`, and idle ones where the runner needs them."""
        rows = {sequence.slot: (sequence, self._row(sequence)) for sequence in sequences}
        span = self._span(sorted(rows))
        filled = [rows.get(slot) or (None, Row(slot, self.slots.length(slot), (IDLE_TOKEN,))) for slot in span]
        plan = self._plan(filled)
        return replace(plan, step=replace(plan.step, copies=copies))

    def _plan(self, rows: Iterable[tuple[Sequence | None, Row]]) -> PlannedStep:
        """The step of these rows, with all logits rows, targets and samples of their sequences."""
        logits_rows: list[LogitsRow] = []
        targets: list[tuple[int, int]] = []
        samples: list[int] = []
        rows = tuple(rows)
        reads_idle = self._traits.async_decode and all(found is None or found.rng is None for found, _ in rows)
        for place, (sequence, row) in enumerate(rows):
            if sequence is None:
                if reads_idle:
                    logits_rows.append(LogitsRow(place, 0))  # a step that follows needs a token for it
                continue
            for position in _read_positions(sequence, row):
                reads = sequence.reads.get(position, ())
                targets.extend((len(logits_rows), read.token) for read in reads)
                if sequence.rng is not None and sequence.wants_next(position):
                    samples.append(len(logits_rows))
                logits_rows.append(
                    LogitsRow(place, position - row.past, max((read.record for read in reads), default=-1))
                )
        step = Step(tuple(row for _, row in rows), tuple(logits_rows), tuple(targets), tuple(samples))
        return PlannedStep(step, tuple(sequence for sequence, _ in rows))

    def _span(self, slots: list[int]) -> list[int]:
        """`slots` and the free ones that must run with them. A sequence that runs alone never has company."""
        if len(slots) == 1 or self._traits.batching in (Batching.PACKED, Batching.ALIKE):
            return slots
        if self._traits.batching is Batching.POOL:
            return list(range(self.slots.num_slots))
        return list(range(slots[0], slots[-1] + 1))

    def _row(self, sequence: Sequence) -> Row:
        start, stop = sequence.computed, sequence.end
        if self._traits.chunked_prefill:
            stop = min(stop, start + min(self.limit, self._chunk_size))
        if not self._traits.can_rewind:
            stop = min((length for length in sequence.checkpoints if start < length < stop), default=stop)
        is_checkpoint = not self._traits.can_rewind and stop in sequence.checkpoints
        return Row(sequence.slot, start, tuple(sequence.tokens[start:stop].tolist()), is_checkpoint, sequence.source)

    def _append(self, sequence: Sequence, token: int) -> None:
        generation, answer = sequence.generation, sequence.answer
        assert generation is not None
        assert answer is not None
        if token in generation.stop_ids:
            answer.finish_reason, answer.stop_id = FinishReason.STOP_ID, token
            return
        answer.generated.append(token)
        self._counters.tokens_generated += 1
        if generation.is_finished is not None and generation.is_finished(answer.generated):
            answer.finish_reason = FinishReason.STOPPED
        elif len(answer.generated) >= generation.max_new_tokens:
            answer.finish_reason = FinishReason.LENGTH
        else:
            sequence.tokens[sequence.end] = token
            sequence.end += 1

    def _retire(self, sequence: Sequence, completed: list[Answer]) -> None:
        if sequence.pending:
            return
        if self._overlapped is None or not self._overlapped.has(sequence):
            self._release(sequence)
        if sequence.answer is not None and sequence.answer.is_complete and sequence.answer not in completed:
            completed.append(sequence.answer)

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.slot]
        self.slots.release(sequence.slot)


def _read_positions(sequence: Sequence, row: Row) -> list[int]:
    """Positions of the row's tokens whose distribution is read, in order."""
    last = row.past + len(row.tokens) - 1
    found = {position for position in sequence.reads if row.past <= position <= last}
    if sequence.wants_next(last):
        found.add(last)
    return sorted(found)
