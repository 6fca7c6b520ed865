"""Plans a step, gives its numbers to results, finds numbers that no working model has, and continues beam searches.
A log-probability of -inf (a suppressed token) and a logit of -inf are lawful. Last overlapped steps: `StepThread` runs
steps while the host reads the output of the step before and plans the step after, in which rows that decode follow rows
of a step that has not been read. Knows no runner.

A beam search is that of transformers 5 (`GenerationMixin._beam_search`). Each of its sequences has a slot:

before   slot 0  7 3 | 9      its best continuation is 4, another one 6
         slot 1  7 3 | 2      has none
after    slot 0  7 3 9 | 4    where its parent was
         slot 1  7 3 9 | 6    a fork of slot 0, whose content stays: what is copied from is never copied to

Axes: T targets, K sampled rows, B sequences that go on, C candidates of each, as many as are looked at of all.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.requests import FinishReason, Hypothesis
from olive_ext.engine.scheduling.sequences import PROBE, PROBED, ChosenRow, PendingResult, Sequence, Targets
from olive_ext.engine.scheduling.slots import Slots
from olive_ext.engine.step import Ban, FloatArray, IntArray, LogitsRow, Step, StepOutput
from olive_ext.errors import NonFiniteError, RunError


class _Beam(NamedTuple):
    """One sequence of a beam search that continues."""

    sequence: Sequence
    tokens: tuple[int, ...]
    score: np.float32
    """The sum of its log-probabilities."""

    is_finished: Callable[[Items[int]], bool] | None


class BeamGroup:
    """A search by `generation.beams`. It begins with one sequence, that of the prompt; the others follow when its
    candidates are known."""

    def __init__(self, root: Sequence, slots: Slots, wanted: Container[int]) -> None:
        """Reserves slots for the other sequences, the `wanted` ones last."""
        assert root.generation is not None
        assert root.generation.beams is not None
        self._generation, self._beams, self._result = root.generation, root.generation.beams, root.result
        self.num_candidates = max(2, 1 + len(self._generation.stop_ids)) * self._beams.num_beams
        """The number of candidates to read, so that enough remain if some end on a stop id."""

        self._slots = slots
        self._running = [_Beam(root, (), np.float32(0), self._generation.is_finished)]
        taken = [slots.take_empty(wanted) for _ in range(self._generation.num_slots - 1)]
        where = root.end, root.result
        self._others = [Sequence(root.tokens.copy(), *where, slot=slot, computed=root.end) for slot in taken]
        self._finished: list[Hypothesis] = []
        self._candidates: dict[int, tuple[FloatArray, IntArray]] = {}

    @property
    def members(self) -> list[Sequence]:
        """All sequences, whether they continue or not."""
        return [*(beam.sequence for beam in self._running), *self._others]

    def advance(self, sequence: Sequence, logprobs_C: FloatArray, ids_C: IntArray) -> int:
        """Takes the candidates that may follow one of the sequences, best first. When all are known, continues the
        sequences or ends the search. Returns the number of forks, which are made before the next step of slots."""
        self._candidates[sequence.slot] = logprobs_C[: self.num_candidates], ids_C[: self.num_candidates]
        if len(self._candidates) < len(self._running):
            return 0
        rows = zip(*(self._candidates[beam.sequence.slot] for beam in self._running), strict=True)
        logprobs_BC, ids_BC = map(np.stack, rows)
        self._candidates.clear()
        if self._result.is_finite:
            going = self._followers(logprobs_BC, ids_BC)
            if not self._is_over(going):
                return self._place(going)
            self._result.put_hypotheses(tuple(self._finished[: self._beams.num_return_sequences]))
        else:
            self._result.finish_reason = FinishReason.NON_FINITE
        for sequence in self.members:
            sequence.has_ended = True
        return 0

    def _followers(self, logprobs_BC: FloatArray, ids_BC: IntArray) -> list[_Beam]:
        """The beams that continue, best first, each with the sequence that it continues."""
        running_B1 = np.array([[beam.score] for beam in self._running], np.float32)
        scores = (running_B1 + logprobs_BC).ravel()
        going: list[_Beam] = []
        for rank, place in enumerate(np.argsort(-scores, kind="stable")[: self.num_candidates].tolist()):
            parent, token = self._running[place // ids_BC.shape[1]], int(ids_BC.flat[place])
            if not scores[place] > -np.inf:
                break  # tokens that the model rules out
            child = _Beam(parent.sequence, (*parent.tokens, token), scores[place], copy.copy(parent.is_finished))
            reason = self._end_of(child)
            if reason is None and len(going) < self._beams.num_beams:
                going.append(child)
            elif reason is not None and rank < self._beams.num_beams:
                score, is_stopped = self._penalized(child.score, len(child.tokens)), reason is FinishReason.STOP_ID
                ended = (child.tokens[:-1], score, reason, token) if is_stopped else (child.tokens, score, reason)
                self._finished.append(Hypothesis(*ended))
                self._finished.sort(key=lambda hypothesis: -hypothesis.score)
                del self._finished[self._beams.num_beams :]
        return going

    def _end_of(self, beam: _Beam) -> FinishReason | None:
        if beam.tokens[-1] in self._generation.stop_ids:
            return FinishReason.STOP_ID
        if beam.is_finished is not None and beam.is_finished(beam.tokens):
            return FinishReason.STOPPED
        return FinishReason.LENGTH if len(beam.tokens) >= self._generation.max_new_tokens else None

    def _is_over(self, going: list[_Beam]) -> bool:
        if not going:
            return True
        if len(self._finished) < self._beams.num_beams:
            return False
        beams, best = self._beams, going[0]
        is_never = beams.early_stopping == "never" and beams.length_penalty > 0
        length = self._generation.max_new_tokens if is_never else len(best.tokens)
        return beams.early_stopping is True or not self._penalized(best.score, length) > self._finished[-1].score

    def _penalized(self, score: np.float32, length: int) -> float:
        return float(score) / float(length**self._beams.length_penalty)

    def _place(self, going: list[_Beam]) -> int:
        """Gives each beam that continues a sequence in a slot, and appends its next token."""
        free = [sequence for sequence in self.members if all(sequence is not beam.sequence for beam in going)]
        num_free, self._running = len(free), []
        for beam in going:
            sequence = beam.sequence
            if any(sequence is placed.sequence for placed in self._running):
                sequence = free.pop(0)
                sequence.continue_from(beam.sequence)
                self._slots.fork(beam.sequence.slot, sequence.slot)
            self._running.append(beam._replace(sequence=sequence))
        for beam in self._running:
            beam.sequence.feed(beam.tokens[-1])
        self._others = free
        return num_free - len(free)


@dataclass(frozen=True)
class PlannedStep:
    """A step, and the sequence of each of its rows (None for idle rows)."""

    step: Step
    sequences: tuple[Sequence | None, ...]
    targets: list[Targets]
    """The sequences' targets, in the order of the step's targets."""

    decoding: list[tuple[Sequence, int]]
    """The sequences whose next token this step finds, each with its logits row."""


def planned(chosen: Items[ChosenRow], beams: Mapping[int, BeamGroup], **more: Any) -> PlannedStep:
    """The step of these rows, with all logits rows, targets and samples of their sequences. `beams` are keyed by slot;
    `more` are other fields of the step."""
    logits_rows: list[LogitsRow] = []
    targets: list[tuple[int, int]] = []
    read: list[Targets] = []
    decoding: list[tuple[Sequence, int]] = []
    samples: list[int] = []
    groups: dict[int, BeamGroup] = {}
    for place, (sequence, row) in enumerate(chosen):
        if sequence is None:
            continue
        past, stop = row.past, row.past + len(row.tokens)
        is_next = sequence.generation is not None and stop >= sequence.end
        parts = sequence.targets_within(past, stop)
        positions = {position for part in parts for position in part.positions}
        if is_next and not sequence.has_bans:
            positions.add(stop - 1)
        first = len(logits_rows)
        numbers = {position: number for number, position in enumerate(sorted(positions), first)}
        logits_rows += [LogitsRow(place, position - past) for position in numbers]
        for part in parts:
            request, read_at = part.result.request, part.positions
            at = [numbers[position] for position in read_at]
            targets += zip(at, request.tokens[read_at.start + 1 : read_at.stop + 1], strict=True)
            for number, record in zip(at, request.records[part.begin : part.stop], strict=False):
                logits_rows[number] = logits_rows[number]._replace(record=max(record, logits_rows[number].record))
        read += parts
        if not is_next:
            continue
        if sequence.has_bans:
            numbers[stop - 1] = len(logits_rows)
            ban = Ban.FIRST if stop <= len(sequence.result.request.tokens) else Ban.LATER
            logits_rows.append(LogitsRow(place, stop - 1 - past, ban=ban))
        number = numbers[stop - 1]
        decoding.append((sequence, number))
        if row.slot in beams:
            groups[number] = beams[row.slot]
        if sequence.needs_rows:
            samples.append(number)
        else:
            targets.append((number, PROBED))
            read.append(Targets(sequence.result, PROBE, PROBE + 1))
    most = max((group.num_candidates for group in groups.values()), default=0)
    sequences, rows = zip(*chosen, strict=True)
    read_of = tuple(logits_rows), tuple(targets), tuple(samples)
    step = Step(rows, *read_of, beams=tuple(groups), num_candidates=most, **more)
    return PlannedStep(step, sequences, read, decoding)


BoolArray = npt.NDArray[np.bool_]


def non_finite(planned: PlannedStep, output: StepOutput, refused_at: int | None) -> tuple[BoolArray, BoolArray]:
    """Which targets [T] and which sampled rows [K] are broken. A target is, where its log-probability is NaN or +inf,
    or its KL divergence from the reference is not finite (which is infinite where the model gives no probability to a
    token that the reference gives some). A sampled row is, where it holds NaN or +inf. Raises `NonFiniteError` for the
    first request and position, where the step has a number, `refused_at`."""
    targets_T: BoolArray = ~(output.target_logprobs < np.inf)
    if (kl_T := _kl(output)) is not None:
        targets_T |= ~np.isfinite(kl_T)
    rows_K = np.logical_not((output.sample_logits_KV < np.inf).all(-1))
    if refused_at is not None:
        _refuse_non_finite(planned, output, targets_T, rows_K, refused_at)
    return targets_T, rows_K


def _kl(output: StepOutput) -> Any:
    """KL of each target [T], where a tap compares distributions; a tap that records them notes none."""
    notes_T = output.notes_T
    return None if notes_T is None or "kl" not in (notes_T.dtype.names or ()) else notes_T["kl"]


def _refuse_non_finite(
    planned: PlannedStep, output: StepOutput, wrong_T: BoolArray, wrong_K: BoolArray, num_steps: int
) -> None:
    if wrong_T.any():
        place = int(wrong_T.argmax())
        index, token = planned.step.targets[place]
        stops = accumulate(part.stop - part.begin for part in planned.targets)
        result = next(part.result for part, stop in zip(planned.targets, stops, strict=True) if place < stop)
        kl = "" if (kl_T := _kl(output)) is None else f", KL divergence from the reference: {kl_T[place]}"
        what = f"log-probability of token {token}: {output.target_logprobs[place]}{kl}"
    elif wrong_K.any():
        index = planned.step.samples[int(wrong_K.argmax())]
        result = next(sequence.result for sequence, number in planned.decoding if number == index)
        what = "a logit is NaN or infinite"
    else:
        return
    logits_row = planned.step.logits_rows[index]
    position = planned.step.rows[logits_row.row].past + logits_row.offset
    raise NonFiniteError(
        f"request {result.key!r}: the model's output after {position + 1} tokens is not finite ({what}, step "
        f"{num_steps}): its weights, its data type or the execution provider give NaN or infinity",
        " (`olive-ext check MODEL --verify` finds the layer; 'non_finite' = \"report\" counts such requests instead)",
    )


def put_scores(planned: PlannedStep, output: StepOutput, wrong_T: BoolArray) -> tuple[list[PendingResult], int]:
    """Puts the scores of a step's targets into their results. Returns the results that are complete now, and how many
    have their first output that is not finite. Probes of generations that ended meanwhile are ignored."""
    completed: list[PendingResult] = []
    num_wrong, notes_T, has_wrong = 0, output.notes_T, bool(wrong_T.any())
    greedy, logprobs = output.greedy_ids.tolist(), output.target_logprobs.tolist()
    is_greedy = [greedy[row] == token for row, token in planned.step.targets]
    stop = 0
    for result, begin, end in planned.targets:
        start, stop = stop, stop + end - begin
        is_probe = begin == PROBE
        if has_wrong and wrong_T[start:stop].any() and not (is_probe and result.finish_reason):
            num_wrong += result.note_non_finite()
        if is_probe:
            continue
        notes = None if notes_T is None else notes_T[start:stop]
        if result.put_scores(begin, logprobs[start:stop], is_greedy[start:stop], notes):
            completed.append(result)
    return completed, num_wrong


THREAD_NAME = "olive_ext-steps"

PAUSE_S = 1e-5
"""Seconds for which the host releases Python's lock between parts of its work, for the thread of the steps."""


class ReadAhead:
    """Passes slices on in order, and can fetch the next slice that is not empty before it is needed. The empty slices
    before it stand for the parts of the work to get there."""

    def __init__(self, slices: Iterable[Items[Any]]) -> None:
        self._source = iter(slices)
        self._read: deque[Items[Any]] = deque()
        self._end: Exception | None = None

    def read(self) -> bool:
        """Does one part of the work; False where all is done."""
        if self._end is not None or (self._read and self._read[-1]):
            return False
        try:
            self._read.append(next(self._source))
        except Exception as error:  # noqa: BLE001 (raised when it is due)
            self._end = error
        return True

    def __iter__(self) -> Iterator[Items[Any]]:
        while self._read or self.read():
            if self._read:
                yield self._read.popleft()
        if self._end is not None and not isinstance(self._end, StopIteration):
            raise self._end


class StepThread:
    """Runs steps in the order in which they are begun, and hands out their outputs in that order. The thread starts
    with the first step. It ends with `close`, when nobody holds this object any more, or with Python."""

    def __init__(self, run: Callable[[Step], StepOutput]) -> None:
        self._run = run
        self._executor: ThreadPoolExecutor | None = None
        self._begun: deque[Future[StepOutput]] = deque()

    @property
    def num_begun(self) -> int:
        """The number of steps whose output has not been taken."""
        return len(self._begun)

    def begin(self, step: Step) -> None:
        """Queues `step`. It does not run where the step before it fails."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, THREAD_NAME)
            # It is not garbage together with this object: its thread would be gone before an iterator, garbage as well,
            # is closed and waits for it.
            self._ends = weakref.finalize(self, self._executor.shutdown, wait=False)
            self._ends.atexit = False
        before, run = self._begun[-1] if self._begun else None, self._run

        def run_after() -> StepOutput:
            if before is not None and before.exception() is not None:
                raise RunError("the step before this one failed")
            return run(step)

        self._begun.append(self._executor.submit(run_after))

    def wait(self, work: Callable[[], bool]) -> None:
        """Calls `work` until the first output is there, or until it returns False."""
        while not self._begun[0].done() and work():
            time.sleep(PAUSE_S)

    def take(self) -> StepOutput:
        """Waits for the first output that has not been taken. Raises the error of its step."""
        output = self._begun[0].result()
        self._begun.popleft()
        return output

    def settle(self) -> None:
        """Drops queued steps and outputs, and returns when nothing runs. It may be interrupted, and called again."""
        for future in self._begun:
            future.cancel()
        if self._executor is not None:
            try:
                self._executor.submit(bool).result()  # after what runs, a step whose `begin` was interrupted too
            except RuntimeError:  # at Python's end, or as garbage: the thread takes no more
                wait([future for future in self._begun if future.running()])
        self._begun.clear()

    def close(self) -> None:
        """Ends the thread when nothing runs. Calling it again does nothing."""
        self.settle()
        if self._executor is not None:
            self._executor.shutdown()
            self._ends.detach()
            self._executor = None
