"""Where the time of an evaluation goes: every second belongs to one phase, and no minute passes in silence. Knows no
model."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from olive_ext.backends.progress import LINE_SECONDS, say, silence
from olive_ext.report.numbers import duration
from olive_ext.report.scores import PHASES

Phase = Literal["tasks", "export", "load", "reference", "candidate", "statistics"]


class Clock:
    """Seconds by phase since it was made. A phase inside of another is not counted twice: its time is its own."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begin = self._since = now()
        self._spent = dict.fromkeys(get_args(Phase), 0.0)
        self._open: list[Phase] = []

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Counts the time inside as `name`'s."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def move(self, seconds: float, source: Phase, target: Phase) -> None:
        """Counts `seconds` of `source` as `target`'s: what was measured inside."""
        self._spent[source] -= seconds
        self._spent[target] += seconds

    def spent(self, name: Phase) -> float:
        """Seconds of an ended phase so far."""
        return self._spent[name]

    def seconds(self) -> dict[str, float]:
        """`seconds` in all, and `seconds_<phase>` of each that took any; the rest belongs to none."""
        spent = {f"seconds_{name}": value for name, value in self._spent.items() if value > 0}
        return {"seconds": self._now() - self._begin, **spent}

    def state(self) -> str:
        """What is done now, and for how long the evaluation has run."""
        doing = PHASES[self._open[-1]] if self._open else "working"
        return f"{doing}, {duration(self._now() - self._begin)} since the beginning"

    @contextmanager
    def told(self, progress: bool, every: float = LINE_SECONDS) -> Iterator[None]:
        """Says `state` on stderr after every `every` seconds in which nothing else was said, where `progress` is shown
        and no terminal has bars."""
        done, begin = threading.Event(), time.monotonic()

        def tell() -> None:
            while not done.wait(every / 10):
                if min(silence(), time.monotonic() - begin) >= every:
                    say(self.state())

        if progress and not sys.stderr.isatty():
            threading.Thread(target=tell, name="progress", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _turn(self) -> None:
        now = self._now()
        if self._open:
            self._spent[self._open[-1]] += now - self._since
        self._since = now
