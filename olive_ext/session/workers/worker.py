"""What a crew drives: one worker, and the ways in which it may be lost. Knows no chunk's place in a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from olive_ext.engine.requests import Pulse, Request
from olive_ext.session.workers.served_model import Reply, Served


class WorkerLostError(Exception):
    """The worker is gone, or was ended because it hung; the message says how, as a clause: "ended by SIGSEGV"."""

    def __init__(self, how: str, advice: str = "") -> None:
        """`advice`: what helps where it is gone before it could do anything, behind ": "."""
        super().__init__(how)
        self.advice = advice


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
    """Tells a hang from long steps. A worker hangs when it has completed no step for `limit_s` seconds; by "auto" for
    `patience` times the longest pause between two of them, and for no less than `least_s`, but never in a step of more
    tokens than one of its kind that it, or the worker before it, has completed. 0: never."""

    patience = 20
    least_s = 120.0
    most_s = 5.0
    """What counts of the time between two looks: behind more, it was the process that looks that stood still."""

    def __init__(self, limit_s: int | Literal["auto"] = "auto") -> None:
        self._limit_s = limit_s
        self._longest_s = 0.0
        self._largest: dict[str, int] = {}
        self._pulse: Pulse | None = None
        self._looked = self._still_s = 0.0

    def begin(self, now: float) -> None:
        """A chunk begins at `now` (seconds)."""
        self._pulse, self._looked, self._still_s = None, now, 0.0

    def is_hung(self, now: float, pulse: Pulse | None) -> bool:
        """`pulse` is what the worker has just told; None where it has told nothing."""
        self._still_s += min(now - self._looked, self.most_s)
        self._looked = now
        if pulse is not None:
            if self._pulse is None or pulse.num_steps != self._pulse.num_steps:
                self._longest_s = max(self._longest_s, self._still_s)
                self._still_s = 0.0
            self._pulse = pulse
            for kind, size in pulse.largest.items():
                self._largest[kind] = max(size, self._largest.get(kind, 0))
        return self._still_s > self._limit()

    def _limit(self) -> float:
        if self._limit_s != "auto":
            return self._limit_s or math.inf
        pulse = self._pulse
        if pulse is None or not pulse.size:  # between two steps
            is_measured = bool(self._largest)
        else:
            is_measured = pulse.size <= self._largest.get(pulse.kind, 0)
        return max(self.least_s, self.patience * self._longest_s) if is_measured else math.inf
