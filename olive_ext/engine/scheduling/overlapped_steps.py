"""Overlapped steps: `StepThread` runs steps while the host reads the output of the step before and plans the step
after, in which rows that decode follow rows of a step that has not been read. Knows no runner.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from olive_ext.engine.step import IntArray, Step, StepOutput
from olive_ext.errors import RunError

THREAD_NAME = "olive_ext-steps"

PAUSE_S = 1e-5
"""How long the host lets go of Python's lock between parts of its work, for the thread of the steps."""


class ReadAhead:
    """Slices in their order, of which the next one that is not empty may be read before it is due. Empty ones before it
    stand for parts of the work that it is."""

    def __init__(self, slices: Iterable[Sequence[Any]]) -> None:
        self._source = iter(slices)
        self._read: deque[Sequence[Any]] = deque()
        self._end: Exception | None = None

    def read(self) -> bool:
        """Does a part of that work; False where it is done."""
        if self._end is not None or (self._read and self._read[-1]):
            return False
        try:
            self._read.append(next(self._source))
        except Exception as error:  # noqa: BLE001 (raised when it is due)
            self._end = error
        return True

    def __iter__(self) -> Iterator[Sequence[Any]]:
        while self._read or self.read():
            if self._read:
                yield self._read.popleft()
        if self._end is not None and not isinstance(self._end, StopIteration):
            raise self._end


def with_tokens(step: Step, found_R: IntArray) -> Step:
    """`step` with the tokens that the previous one has found, now that the host has read them."""
    tokens = found_R.tolist()
    pairs = zip(step.rows, step.follows, strict=True)
    rows = tuple([row if read < 0 else row._replace(tokens=(tokens[read],)) for row, read in pairs])
    return replace(step, rows=rows, follows=())


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
        """Puts `step` after those that were begun before. An overlapped one is not run where the one before failed."""
        if self._end is None:
            queues = self._jobs, self._outcomes
            thread = threading.Thread(target=_serve, args=queues, name=THREAD_NAME, daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _finish, self._jobs, thread)
        self._jobs.put(partial(self._work, step, self._era, is_overlapped))
        self.num_begun += 1

    def wait(self, work: Callable[[], bool]) -> None:
        """Does `work` again and again, up to the first output, or until it returns False."""
        while self._outcomes.empty() and work():
            time.sleep(PAUSE_S)

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
