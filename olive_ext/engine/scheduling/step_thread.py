"""Runs steps in a thread of its own, one after the other, while the host does something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import RunError

NAME = "olive_ext-steps"


class StepThread:
    """The thread starts with the first step and ends with `close`, or when nobody holds this object."""

    def __init__(self, run: Callable[[Step], StepOutput]) -> None:
        self._run = run
        self._executor: ThreadPoolExecutor | None = None
        self._era = 0
        self._has_failed = False

    def begin(self, step: Step) -> Future[StepOutput]:
        """Puts `step` behind those that were begun before. One that follows a step that failed is not run."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=NAME)
        return self._executor.submit(self._work, step, self._era)

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

    def _work(self, step: Step, era: int) -> StepOutput:
        if era != self._era:
            raise CancelledError
        if step.uses_previous_tokens and self._has_failed:
            raise RunError("the step before this one failed")
        self._has_failed = True
        output = self._run(step)
        self._has_failed = False
        return output
