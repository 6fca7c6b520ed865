"""Overlapped steps: the step behind one that has not been read. Where that decodes, the next one has the same rows, fed
with the tokens which that finds; else it computes inputs, of which nothing is to be found.

The functions that plan the former are pure; `StepThread` runs them while the host does something else. Knows no runner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import IntArray, LogitsRow, Row, Step, StepOutput
from olive_ext.errors import RunError

UNKNOWN_TOKEN = 0
"""Stands in the rows of a step whose tokens are not read yet."""

THREAD_NAME = "olive_ext-steps"


@dataclass(frozen=True)
class PlannedStep:
    """A step, and the sequence of each of its rows: None for idle rows."""

    step: Step
    sequences: tuple[Sequence | None, ...]

    def has(self, sequence: Sequence) -> bool:
        """Whether one of the rows is the sequence's."""
        return any(found is sequence for found in self.sequences)


def can_be_followed(planned: PlannedStep) -> bool:
    """Whether each row finds exactly one token, and that is its sequence's next one; rows that are idle, or whose
    sequence has ended, find one that nobody reads."""
    step = planned.step
    read = [(found.row, found.offset) for found in step.logits_rows]
    is_plain = step.first_cell is None and not step.whole_rows
    if not is_plain or read != [(place, len(row.tokens) - 1) for place, row in enumerate(step.rows)]:
        return False
    return all(
        sequence is None or sequence.has_ended or sequence.wants_next(row.past + len(row.tokens) - 1)
        for row, sequence in zip(step.rows, planned.sequences, strict=True)
    )


def goes_on(sequence: Sequence) -> bool:
    """Whether a sequence whose next token is being computed may have one more behind that."""
    return not sequence.has_ended and sequence.end < len(sequence.tokens)


def following(planned: PlannedStep, chosen: Container[int], capacity: int) -> PlannedStep:
    """The step behind `planned`, in which the rows of slots that are not `chosen` are idle."""
    rows: list[Row] = []
    sequences: list[Sequence | None] = []
    for row, sequence in zip(planned.step.rows, planned.sequences, strict=True):
        is_live = sequence is not None and row.slot in chosen
        past = row.past if sequence is None else row.past + len(row.tokens)
        # An idle row writes behind what is resident, or over the position that a released slot leaves unused.
        past = past if is_live else min(past, capacity - 1)
        rows.append(replace(row, past=past, tokens=(UNKNOWN_TOKEN,), is_checkpoint=False))
        sequences.append(sequence if is_live else None)
    logits_rows = tuple(LogitsRow(place, 0) for place in range(len(rows)))
    live = [(place, sequence) for place, sequence in enumerate(sequences) if sequence is not None]
    probes = tuple((place, sequence.probe_token) for place, sequence in live)
    return PlannedStep(Step(tuple(rows), logits_rows, probes, uses_previous_tokens=True), tuple(sequences))


def with_tokens(planned: PlannedStep, tokens_B: IntArray) -> PlannedStep:
    """`planned` with the tokens that the previous step has sampled, now that the host has read them."""
    if not planned.step.uses_previous_tokens:
        return planned
    rows = tuple(replace(row, tokens=(token,)) for row, token in zip(planned.step.rows, tokens_B.tolist(), strict=True))
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
