"""Overlapped steps: the step behind one that has not been read. Where that decodes, the next one has the same rows, fed
with the tokens which that finds; else it computes inputs, of which nothing is to be found.

The functions that plan the former are pure; `StepThread` runs them while the host does something else. Knows no runner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

from olive_ext.engine.scheduling.planned_step import IDLE, PlannedStep, Reading
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import IntArray, LogitsRow, Row, Step, StepOutput
from olive_ext.errors import RunError

UNKNOWN_TOKEN = 0
"""Stands in the rows of a step whose tokens are not read yet."""

THREAD_NAME = "olive_ext-steps"


def can_be_followed(planned: PlannedStep) -> bool:
    """Whether each row finds exactly one token, and that is its sequence's next one; rows that are idle find one that
    nobody reads."""
    step = planned.step
    if step.first_cell is not None or step.whole_rows or len(planned.readings) != len(step.rows):
        return False
    return all(reading.is_next or reading.sequence is None for reading in planned.readings)


def goes_on(sequence: Sequence) -> bool:
    """Whether a sequence whose next token is being computed may have one more behind that."""
    return not sequence.has_ended and sequence.end < len(sequence.tokens)


def following(planned: PlannedStep, chosen: Container[int], capacity: int) -> PlannedStep:
    """The step behind `planned`, in which the rows of slots that are not `chosen` are idle."""
    rows: list[Row] = []
    probes: list[tuple[int, int]] = []
    readings: list[Reading] = []
    for row, sequence in zip(planned.step.rows, planned.sequences, strict=True):
        past = row.past if sequence is None else row.past + len(row.tokens)
        if sequence is not None and row.slot in chosen:
            probes.append((len(rows), sequence.probe.token))
            readings.append(Reading(sequence, [sequence.probe], is_next=True))
        else:
            # An idle row writes behind what is resident, or over the position that a released slot leaves unused.
            past = min(past, capacity - 1)
            readings.append(IDLE)
        rows.append(row._replace(past=past, tokens=(UNKNOWN_TOKEN,), is_checkpoint=False))
    logits_rows = tuple(LogitsRow(place, 0) for place in range(len(rows)))
    step = Step(tuple(rows), logits_rows, tuple(probes), uses_previous_tokens=True)
    return PlannedStep(step, tuple(reading.sequence for reading in readings), tuple(readings))


def with_tokens(planned: PlannedStep, tokens_B: IntArray) -> PlannedStep:
    """`planned` with the tokens that the previous step has sampled, now that the host has read them."""
    if not planned.step.uses_previous_tokens:
        return planned
    pairs = zip(planned.step.rows, tokens_B.tolist(), strict=True)
    rows = tuple(row._replace(tokens=(token,)) for row, token in pairs)
    return replace(planned, step=replace(planned.step, rows=rows, uses_previous_tokens=False))


class StepThread:
    """The thread starts with the first step and ends with `close`, or when nobody holds this object."""

    def __init__(self, run: Callable[[Step], StepOutput]) -> None:
        self._run = run
        self._executor: ThreadPoolExecutor | None = None
        self._era = 0
        self._has_failed = False

    def begin(self, step: Step, *, is_overlapped: bool) -> Future[StepOutput]:
        """Puts `step` behind those that were begun before. An overlapped one is not run where the one before failed."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
        return self._executor.submit(self._work, step, self._era, is_overlapped)

    def settle(self) -> None:
        """Drops what waits, and returns when nothing runs. May be interrupted, and called again."""
        if self._executor is not None:
            self._era += 1
            with contextlib.suppress(RuntimeError):  # Python is ending, and has waited for the thread
                self._executor.submit(int).result()

    def close(self) -> None:
        """Settles and ends the thread. Calling it again does nothing."""
        self._era += 1
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _work(self, step: Step, era: int, is_overlapped: bool) -> StepOutput:
        if era != self._era:
            raise CancelledError
        if is_overlapped and self._has_failed:
            raise RunError("the step before this one failed")
        self._has_failed = True
        output = self._run(step)
        self._has_failed = False
        return output
