"""Runs a job in a process of its own and reads what it measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from olive_ext.bench.job import Job, Run
from olive_ext.python_processes import module_command

_WORKER = "olive_ext.bench.worker"
_GRACE_SECONDS = 5.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class Launcher:
    """`launch(job, round)` runs one job to its end. `folder` is for logs and results.

    `command` is given the job on stdin and the result's path as its last argument.
    """

    def __init__(self, folder: Path, timeout: float | None = None, command: Sequence[str] | None = None) -> None:
        self._command = module_command(_WORKER) if command is None else command
        self._folder = folder
        self._timeout = timeout
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, job: Job, number: int = 0) -> Run:
        """A process that fails, is killed or takes too long gives a `Run` with an `error`. An interruption ends it."""
        self._number += 1
        size = job.opening.get("batch_size")
        name = f"{self._number:03}-{job.backend or job.task}{'' if size is None else f'-{size}'}"
        result, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        result.unlink(missing_ok=True)
        begin = time.perf_counter()
        with log.open("wb") as output:
            status = self._run(job, result, output)
        seconds = time.perf_counter() - begin
        run = Run(job.backend, size, number)
        if result.exists():
            found = {**asdict(run), **json.loads(result.read_text(encoding="utf-8"))}
            return replace(Run.read(found), seconds_total=seconds)
        return replace(run, error=_why(status, self._timeout, log), seconds_total=seconds)

    def _run(self, job: Job, result: Path, output: Any) -> int | None:
        """The exit status; None where the time was up."""
        with subprocess.Popen(
            [*self._command, str(result)], stdin=subprocess.PIPE, stdout=output, stderr=output, env=_environment(job)
        ) as process:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
                process.stdin.flush()
                return process.wait(self._timeout)
            except BrokenPipeError:
                return process.wait()
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _environment(job: Job) -> Mapping[str, str]:
    threads = job.opening.get("num_threads")
    chosen = {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**os.environ, **quiet, **chosen}


def _why(status: int | None, timeout: float | None, log: Path) -> str:
    if status is None:
        return f"stopped after {timeout:.0f} s"
    if status < 0:
        hint = ", perhaps for want of memory" if status == -getattr(signal, "SIGKILL", 0) else ""
        return f"ended by {signal.Signals(-status).name}{hint}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"ended with {status}{': ' + lines[-1][:200] if lines else ''}"
