"""The most memory a piece of work takes. Knows no model."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil
from typing_extensions import Self

_INTERVAL_SECONDS = 0.01


class PeakMemory:
    """While it is entered, `bytes` is the largest resident size of this process so far, looked at every 10 ms.

    Unlike the operating system's own maximum it knows nothing of what the process did before.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._look()
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL_SECONDS):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, int(self._process.memory_info().rss))
