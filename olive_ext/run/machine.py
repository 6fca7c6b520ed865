"""This machine's facts for a report, the peak memory of a piece of work, and where its time goes. Knows no model."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psutil
from typing_extensions import Self

from olive_ext.backends.progress import LINE_SECONDS, say, silence
from olive_ext.python_processes import usable_processors
from olive_ext.report.numbers import duration
from olive_ext.report.view import PHASES

_CPU_INFO = Path("/proc/cpuinfo")
_GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_TIMEOUT_S = 10
_INTERVAL_S = 0.01


def describe_hardware() -> dict[str, Any]:
    """JSON-ready facts: `cpu`, `cores`, `threads`, `usable_threads`, `memory_bytes`, `gpus`, `os`, `python`.

    A fact that the machine does not give is left out. `usable_threads` are those that this process may run on, fewer
    in a container or under a job scheduler.
    """
    facts = {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": usable_processors(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _nvidia_gpus(),
        "os": platform.platform(),
        "python": platform.python_version(),
    }
    return {name: value for name, value in facts.items() if value}


def _cpu_name() -> str:
    """The processor's name: Linux has it in a file only, macOS in a command's output, Windows in its environment."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "Model") and value.strip():
                return value.strip()
    if platform.system() == "Darwin":
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor() or platform.machine()


def _nvidia_gpus() -> list[dict[str, Any]]:
    """Name, memory and driver of each GPU that NVIDIA's driver lists."""
    rows = [line.split(", ") for line in _output_of("nvidia-smi", *_GPU_QUERY).splitlines()]
    return [
        {"name": name, "memory_mib": int(memory) if memory.isdigit() else None, "driver": driver}
        for name, memory, driver in (row for row in rows if len(row) == 3)
    ]


def _output_of(*command: str) -> str:
    """The command's stdout; empty where the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def resident_memory() -> Callable[[], int]:
    """A function that returns the resident memory of this process, in bytes."""
    process = psutil.Process()
    return lambda: int(process.memory_info().rss)


class PeakMemory:
    """Within it, `bytes` is the largest value that `read` has returned so far, called every 10 ms; by default this
    process's resident memory.

    Unlike the operating system's maximum of a process's memory, it does not count what was used before.
    """

    def __init__(self, read: Callable[[], int] | None = None) -> None:
        self.bytes = 0
        self._read = read or resident_memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL_S):
            with suppress(OSError, psutil.Error):  # the machine cannot tell just now; the last look is the caller's
                self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, self._read())


Phase = Literal["tasks", "export", "load", "reference", "candidate", "statistics"]


class Clock:
    """Seconds by phase since it was made. A phase inside another is not counted twice: its time is its own."""

    def __init__(self) -> None:
        self._begin = self._since = time.monotonic()
        self._spent = dict.fromkeys(PHASES, 0.0)
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
        """Moves `seconds` from `source` to `target`: they were measured inside it."""
        self._spent[source] -= seconds
        self._spent[target] += seconds

    def spent(self, name: Phase) -> float:
        """Seconds of an ended phase so far."""
        return self._spent[name]

    def seconds(self) -> dict[str, float]:
        """`seconds` in all, and `seconds_<phase>` of each phase that took any; the rest belongs to no phase."""
        spent = {f"seconds_{name}": value for name, value in self._spent.items() if value > 0}
        return {"seconds": time.monotonic() - self._begin, **spent}

    def state(self) -> str:
        """The current phase, and for how long the evaluation has run."""
        doing = PHASES[self._open[-1]] if self._open else "working"
        return f"{doing}, {duration(time.monotonic() - self._begin)} since the beginning"

    @contextmanager
    def reporting(self, progress: bool, every: float = LINE_SECONDS) -> Iterator[None]:
        """Prints `state` on stderr after `every` seconds without output, if `progress` is shown and has no bars."""
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
        now = time.monotonic()
        if self._open:
            self._spent[self._open[-1]] += now - self._since
        self._since = now
