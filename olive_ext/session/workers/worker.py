"""What a crew drives: one worker, and the ways in which it may be lost. Knows no chunk's place in a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from olive_ext.engine.requests import Request
from olive_ext.session.workers.served_model import Reply, Served


class WorkerLostError(Exception):
    """The worker is gone, or was ended because it hung; the message says how, as a clause: "ended by SIGSEGV"."""


class Worker(Protocol):
    """One worker. Calls block; another thread may `stop` it meanwhile."""

    name: str
    """The worker's, for progress and messages."""

    def open(self) -> Served:
        """Starts it, anew after it was lost, and opens its model. Raises the errors of opening, or
        `WorkerLostError`."""

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        """Runs a chunk. Raises `WorkerLostError`, and what the model raises."""

    def call(self, which: str, name: str) -> Any:
        """See `ServedModel.call`."""

    def stop(self) -> None:
        """Ends it, at once where it is busy. May be called again."""


class Watchdog:
    """Tells a hang from long steps: a worker hangs when its steps have not grown for `patience` times the longest pause
    between two of them, and for no less than `least_s` seconds."""

    patience = 20

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._longest = 0.0
        self._num_steps = -1
        self._since = 0.0

    def begin(self, now: float) -> None:
        """A chunk begins at `now` (seconds)."""
        self._since, self._num_steps = now, -1

    def is_hung(self, now: float, num_steps: int | None) -> bool:
        """`num_steps` is what the worker has just told; None where it has told nothing."""
        if num_steps is not None and num_steps != self._num_steps:
            if self._num_steps >= 0:
                self._longest = max(self._longest, now - self._since)
            self._num_steps, self._since = num_steps, now
        return now - self._since > max(self._least_s, self.patience * self._longest)
