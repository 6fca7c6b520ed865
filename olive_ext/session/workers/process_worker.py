"""A worker in a process of its own on this machine: `ProcessWorker` in the parent, `serve_model` in the child."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from olive_ext import errors
from olive_ext.engine.requests import Request
from olive_ext.python_processes import BEAT_S, ChildEndedError, ChildProcess, serve
from olive_ext.session.workers.worker import (
    Reply,
    Respondent,
    Served,
    ServedModel,
    Watchdog,
    Worker,
    WorkerJob,
    WorkerLostError,
    opened_envelope,
)

_TAKE_LESS = ": close other programs, or take less ('engine.num_slots', 'max_length', 'workers', 'reference.mode')"
_SEE_ABOVE = ": what it printed is above"
_CHILD = "from olive_ext.session.workers.process_worker import serve_model; serve_model()"


class ProcessWorker(Worker):
    """A child process with the model of `job`."""

    def __init__(self, job: WorkerJob, watchdog: Watchdog, name: str = "worker", child: str = _CHILD) -> None:
        """`child`: the Python text that the child runs; it calls `serve_model`."""
        self.name = name
        self._program = child
        self._job = job
        self._watchdog = watchdog
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return None if self._child is None else self._child.pid

    @override
    def open(self) -> Served:
        self.stop()
        self._child = ChildProcess(self._program)  # another thread may stop it from here on
        served: Served = self._answer("open", self._job)
        return served

    @override
    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        self._watchdog.begin(time.monotonic())
        reply: Reply = self._answer("run", which, requests, is_watched=True)
        return reply

    @override
    def call(self, which: str, name: str) -> Any:
        return self._answer("call", which, name)

    @override
    def stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _answer(self, *message: Any, is_watched: bool = False) -> Any:
        """The child's answer to the message, behind its beats."""
        child = self._child
        if child is None:
            raise WorkerLostError("not running")
        try:
            child.send(message)
            while True:
                kind, content = child.receive(2 * BEAT_S)
                if kind == "answer":
                    return opened_envelope(content)
                if is_watched and self._watchdog.is_hung(time.monotonic(), content):
                    self.stop()
                    raise WorkerLostError("ended because it hung")
        except ChildEndedError as error:
            self._child = None
            advice = _TAKE_LESS if error.was_killed else _SEE_ABOVE if str(error).startswith("ended ") else ""
            raise WorkerLostError(str(error), advice) from None


def serve_model(open_served: Callable[[WorkerJob], Any] = ServedModel) -> None:
    """The child: opens what the first message names, then answers until there are no more messages."""
    errors.logger.disabled = True  # the parent has told what is ignored
    respondent = Respondent(open_served)
    serve(lambda message: respondent.answer(*message), respondent.num_steps)
    respondent.close()
