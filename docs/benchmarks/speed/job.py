"""The jobs of processes, what they measure, which backend runs when, and the launcher of a process. Knows no model.

All backends run by turns, several rounds, each at the batch size that was fastest when all were tried.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, Literal

from typing_extensions import Self

from olive_ext.python_processes import BEAT_S, ChildEndedError, ChildProcess

OURS = "olive-ext"
"""The name of our backend among the others."""

Task = Literal["answer", "latencies", "ceiling"]

BATCHED = ("hf", "olive-ort", "olive-ortgenai")
"""Backends that take a batch size; lm-eval's ONNX backends run at 1, and ours chooses."""

PROBE = -1
"""The round in which batch sizes are tried on part of the work."""


@dataclass(frozen=True)
class BenchJob:
    """One process's work.

    answer: opens `backend` and answers the file `requests`; latencies: our backend answers the generations among
    `requests` with `in_flight` of them at a time; ceiling: products of `matrices`, on no model.
    """

    task: Task
    backend: str = ""
    opening: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `peers.Opening`."""

    requests: str = ""
    answers: str = ""
    """File that the answers are written to."""

    staging: str = ""
    warmup: int = 0
    counts_tokens: bool = False
    """Whether the requests' tokens are counted, after the clock."""

    in_flight: int = 1
    matrices: Sequence[tuple[int, int, int]] = ()
    """(inner size, columns, how many) of the model's products with weights."""


@dataclass(frozen=True)
class BenchRun:
    """What one process measured; with an `error` the rest is empty. Seconds, and bytes of memory."""

    backend: str
    batch_size: int | None = None
    round: int = 0
    error: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds inside the model's calls, by kind of request."""

    seconds_open: float = 0.0
    seconds_total: float = 0.0
    """Seconds from the process's start to its end, measured by its parent."""

    memory: Mapping[str, float] = field(default_factory=dict)
    """`before` and `open`: resident before and after the model was opened; `warm`: after the warm-up; `peak`: most
    within the clock; `weights`: the model's files. On a GPU also `device_before`, `device_open`, `device_peak`."""

    counters: Mapping[str, float] = field(default_factory=dict)
    """Our engine's counters for the timed part of the run."""

    execution: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)
    """See `work.count_tokens`."""

    agreement: Mapping[str, Any] = field(default_factory=dict)
    """See `summary.agreement`; put in once the reference's answers are there."""

    series: Sequence[Mapping[str, float]] = ()
    """For a job of latencies: `in_flight`, `is_warm` (0 or 1) and what `latency.describe` finds, cold and warmed."""

    flops_per_second: float = 0.0
    """For a job of the ceiling: floating-point operations per second."""

    @property
    def memory_above(self) -> float:
        """Bytes: the most memory that was resident, less what was resident when the model had been opened. Weights that
        were mapped but not yet read at that time count as the model's, too."""
        memory = self.memory
        own = memory["open"] if "device_peak" in memory else max(memory["open"], memory["before"] + memory["weights"])
        return memory["peak"] - own

    @property
    def in_model(self) -> float:
        """Seconds inside the model's calls."""
        return sum(self.seconds.values())

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """A run from its JSON; keys that are no fields are left out."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


@dataclass(frozen=True)
class Schedule:
    """`backends` in order, ours first; `once`: in the first round only."""

    backends: Sequence[str]
    batch_sizes: Sequence[int]
    rounds: int
    once: Sequence[str] = ()
    probes: bool = False
    """Whether batch sizes are tried in a round of their own before the first; else in the first."""

    def run(self, measure: Callable[[str, int | None, int], BenchRun]) -> Iterator[BenchRun]:
        """Every run as it ends. A backend that failed is not run again.

        `measure` runs one process, given the backend, its batch size and the round.
        """
        done: list[BenchRun] = []
        for number in range(PROBE if self.probes else 0, self.rounds):
            for backend in self.backends:
                for size in self._sizes(backend, number, done):
                    run = measure(backend, size, number)
                    done.append(run)
                    yield run

    def _sizes(self, backend: str, number: int, done: Sequence[BenchRun]) -> Sequence[int | None]:
        own = [run for run in done if run.backend == backend]
        if number == PROBE:
            return self.batch_sizes if backend in BATCHED else []
        if not own:
            return self.batch_sizes if backend in BATCHED else [None]
        chosen = best(own)
        is_over = backend in self.once and number > 0
        failed = any(run.error for run in own if run.round > own[0].round)
        return [] if is_over or failed or chosen is None else [chosen.batch_size]


def best(runs: Sequence[BenchRun]) -> BenchRun | None:
    """The fastest of a backend's first round, the probe where there was one; None where none succeeded."""
    good = [run for run in runs if run.round == runs[0].round and not run.error]
    return min(good, key=lambda run: run.in_model) if good else None


_ROOT = Path(__file__).resolve().parents[3]
_CHILD = f"sys.path.insert(0, {str(_ROOT)!r}); from docs.benchmarks.speed.worker import serve_jobs; serve_jobs()"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class Launcher:
    """`launch(job, round)` runs one job to its end. `folder` is for logs; `child` is the Python text that a process
    runs."""

    def __init__(self, folder: Path, timeout: float | None = None, child: str = _CHILD) -> None:
        self._child = child
        self._folder = folder
        self._timeout = timeout
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, job: BenchJob, number: int = 0) -> BenchRun:
        """A process that fails, is killed or takes too long gives a `BenchRun` with an `error`. An interruption ends
        it."""
        self._number += 1
        size = job.opening.get("batch_size")
        log = self._folder / f"{self._number:03}-{job.backend or job.task}{'' if size is None else f'-{size}'}.log"
        begin = time.perf_counter()
        with log.open("wb") as output:
            measured = self._measured(job, output)
        seconds = time.perf_counter() - begin
        if str(measured.get("error", "")).startswith("ended with status"):
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            measured["error"] += f": {lines[-1][:200]}" if lines else ""
        run = BenchRun(job.backend, size, number)
        return replace(BenchRun.read({**asdict(run), **measured}), seconds_total=seconds)

    def _measured(self, job: BenchJob, log: IO[bytes]) -> dict[str, Any]:
        """The fields of a run that the process knows, or an `error`."""
        child = ChildProcess(self._child, environment=_environment(job), stderr=log)
        end = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            child.send(job)
            while end is None or time.monotonic() < end:
                kind, content = child.receive(BEAT_S if end is None else max(0.0, end - time.monotonic()))
                if kind == "answer":
                    return dict(content)
            return {"error": f"stopped after {self._timeout:.0f} s"}
        except ChildEndedError as error:
            return {"error": str(error)}
        finally:
            child.stop()


def _environment(job: BenchJob) -> Mapping[str, str]:
    threads = job.opening.get("num_threads")
    chosen = {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**os.environ, **quiet, **chosen}
