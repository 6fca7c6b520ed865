"""Overlapped steps: the step behind one that has not been read. Where that decodes, the next one has the same rows, fed
with the tokens which that finds; else it computes inputs, of which nothing is to be found.

The functions that plan the former are pure; `StepThread` runs them while the host does something else. Knows no runner.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import lru_cache, partial
from queue import SimpleQueue

from olive_ext.engine.scheduling.planned_step import IDLE, PlannedStep
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import Ban, IntArray, LogitsRow, Row, Step, StepOutput
from olive_ext.errors import RunError

UNKNOWN = (0,)
"""Stands in the rows of a step whose tokens are not read yet."""

THREAD_NAME = "olive_ext-steps"


def following(planned: PlannedStep, chosen: Container[Sequence | None], capacity: int) -> PlannedStep:
    """The step behind `planned`, each row of which finds one token, fed with these. The rows of sequences that are not
    `chosen` are idle: they write behind what is resident, or over the position that a released slot leaves unused."""
    before, step = planned.sequences, planned.step
    now = tuple([sequence if sequence in chosen else None for sequence in before])
    resident = [row.past + len(row.tokens) if fed else row.past for row, fed in zip(step.rows, before, strict=True)]
    pasts = [past if feeds else min(past, capacity - 1) for past, feeds in zip(resident, now, strict=True)]
    rows = [
        Row(row.slot, past, UNKNOWN, False, row.source, row.media if feeds else ())
        for row, past, feeds in zip(step.rows, pasts, now, strict=True)
    ]
    readings = tuple([IDLE if sequence is None else sequence.decoding for sequence in now])
    targets = [(place, reading.reads[0].token) for place, reading in enumerate(readings) if reading.reads]
    logits_rows = one_each(len(rows))
    if [True for sequence in now if sequence is not None and sequence.ban_at(sequence.num_input)]:
        bans = [Ban.NONE if sequence is None else sequence.ban_at(sequence.num_input) for sequence in now]
        logits_rows = tuple([row._replace(ban=ban) for row, ban in zip(logits_rows, bans, strict=True)])
    side = step.whole_length
    followed = Step(tuple(rows), logits_rows, tuple(targets), uses_previous_tokens=True, whole_length=side)
    return PlannedStep(followed, now, readings)


@lru_cache
def one_each(num_rows: int) -> tuple[LogitsRow, ...]:
    """The logits rows of a step whose rows have a token each."""
    return tuple([LogitsRow(place, 0) for place in range(num_rows)])


def with_tokens(step: Step, tokens_B: IntArray) -> Step:
    """`step` with the tokens that the previous one has found, now that the host has read them."""
    pairs = zip(step.rows, tokens_B.tolist(), strict=True)
    rows = tuple([row._replace(tokens=(token,)) for row, token in pairs])
    return replace(step, rows=rows, uses_previous_tokens=False)


class StepThread:
    """Runs steps in the order in which they are begun; their outputs are taken in that order. The thread starts with
    the first step, and ends with `close`, when nobody holds this object, or with Python.

    Two queues cost a step a tenth of what an executor's futures do.
    """

    def __init__(self, run: Callable[[Step], StepOutput]) -> None:
        self._run = run
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[object] = SimpleQueue()
        self._end: weakref.finalize[..., StepThread] | None = None
        self._era = 0
        self._has_failed = False
        self.num_begun = 0
        """Steps whose output has not been taken."""

    def begin(self, step: Step, *, is_overlapped: bool) -> None:
        """Puts `step` behind those that were begun before. An overlapped one is not run where the one before failed."""
        if self._end is None:
            queues = self._jobs, self._outcomes
            thread = threading.Thread(target=_serve, args=queues, name=THREAD_NAME, daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _finish, self._jobs, thread)
        self._jobs.put(partial(self._work, step, self._era, is_overlapped))
        self.num_begun += 1

    def take(self) -> StepOutput:
        """Waits for the first output that has not been taken. Raises the error that there was instead."""
        outcome = self._outcomes.get()
        self.num_begun -= 1
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, StepOutput)
        return outcome

    def settle(self) -> None:
        """Drops what waits and what was found, and returns when nothing runs. May be interrupted, and called again."""
        self._era += 1
        if self._end is not None and self._end.alive:  # at Python's end the thread is gone already
            mark = object()
            self._jobs.put(lambda: mark)
            while self._outcomes.get() is not mark:
                pass
        self.num_begun = 0

    def close(self) -> None:
        """Settles and ends the thread. Calling it again does nothing."""
        self.settle()
        if self._end is not None:
            self._end()
            self._end = None

    def _work(self, step: Step, era: int, is_overlapped: bool) -> StepOutput:
        if era != self._era:
            raise CancelledError
        if is_overlapped and self._has_failed:
            raise RunError("the step before this one failed")
        self._has_failed = True
        output = self._run(step)
        self._has_failed = False
        return output


def _serve(jobs: SimpleQueue[Callable[[], object] | None], outcomes: SimpleQueue[object]) -> None:
    """Puts what each job returns or raises into `outcomes`, until None comes. Holds nothing while it waits."""
    while (job := jobs.get()) is not None:
        try:
            outcomes.put(job())
        except BaseException as error:  # noqa: BLE001 (raised where it is taken)
            outcomes.put(error)
        del job


def _finish(jobs: SimpleQueue[Callable[[], object] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
