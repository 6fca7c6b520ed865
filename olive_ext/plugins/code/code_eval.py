"""`code_eval` of Hugging Face's evaluate, with which lm-eval's tasks of code are scored: offline, the programs of a
whole task at once, each confined by `child` in a process of its own.

What it computes is that library's: the same arguments, results and estimator. Knows no model.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from olive_ext.backends.code_eval import SWITCH
from olive_ext.backends.evaluated_task import pass_at
from olive_ext.errors import RunError
from olive_ext.python_processes import import_path, python_command, usable_processors

MODES = {
    "namespaces": "no network, no files but Python's own, an empty folder in memory, namespaces of its own",
    "user": "as a user of its own: the network and files that everybody may read are within reach",
    "limits": "as the same user: the network, files and processes of that user are within reach of native code",
}
"""How far a program is confined, the best first; in each with limits on time, memory, files and processes."""

CHILD = Path(__file__).with_name("child.py")
NONCE = 32
"""Bytes in front of the program's text: what is sent back where the program has ended by itself."""

TIMED_OUT = 124
"""Exit status of a child whose program was stopped by the clock."""

_LONGEST_MESSAGE = 4096
_OWN_USERS = 0x6F000000
_GRACE_S = 5.0


@dataclass(frozen=True)
class Limits:
    """What one program may take. Seconds and bytes."""

    cpu_s: int = 3
    """Seconds of the processor, of each of its processes."""

    wall_s: float = 9.0
    """Seconds by the clock, for all of them."""

    memory_bytes: int = 1 << 30
    """The most address space of each of its processes."""

    file_bytes: int = 16 << 20
    folder_bytes: int = 64 << 20
    """The most bytes of all files, in namespaces."""

    processes: int = 32
    files: int = 64
    """Open ones, of each of its processes."""


class Outcome(NamedTuple):
    """How a program ended: "passed", "timed out", or "failed: " and why."""

    passed: bool
    result: str


@dataclass
class Sandbox:
    """Programs of one kind of confinement. Raises `RunError` where this machine has none of `modes`."""

    limits: Limits = field(default_factory=Limits)
    modes: Sequence[str] = tuple(MODES)

    def __post_init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._numbers = itertools.count()
        for mode in self.modes:
            self.mode = mode
            if mode == "limits" and os.getuid() == 0:
                self.refused[mode] = "root has no limit on processes"
            elif mode == "user" and os.getuid() != 0:
                self.refused[mode] = "only root can become another user"
            else:
                outcome = self._outcome("import os, subprocess, math", self.limits)
                if outcome.passed:
                    return
                self.refused[mode] = outcome.result.partition(": ")[2] or outcome.result
        reasons = "; ".join(f"{mode}: {reason}" for mode, reason in self.refused.items())
        raise RunError(f"generated code cannot be confined on this machine: {reasons}")

    @property
    def description(self) -> str:
        """The confinement in words, with why there is no better one."""
        why = "".join(f"; not with {mode}: {reason}" for mode, reason in self.refused.items())
        return f"{self.mode} ({MODES[self.mode]}{why})"

    def run(self, programs: Sequence[str], cpu_s: float | None = None) -> list[Outcome]:
        """How each program ended, as many at a time as this process has cores. `cpu_s`: another limit on seconds of the
        processor, and three times as many by the clock."""
        if not programs:
            return []
        limits = self.limits
        if cpu_s is not None:
            limits = replace(limits, cpu_s=math.ceil(cpu_s), wall_s=3.0 * math.ceil(cpu_s))
        with ThreadPoolExecutor(min(len(programs), usable_processors() or 1), thread_name_prefix="sandbox") as pool:
            return list(pool.map(lambda program: self._outcome(program, limits), programs))

    def _outcome(self, program: str, limits: Limits) -> Outcome:
        nonce = secrets.token_bytes(NONCE)
        with tempfile.TemporaryDirectory(prefix="olive_ext_code_", ignore_cleanup_errors=True) as folder:
            options = self._options(folder, limits)
            with tempfile.TemporaryFile() as job:
                job.write(nonce + program.encode("utf-8", "surrogatepass"))
                job.seek(0)
                message, status = _exchange(options, job, limits.wall_s + _GRACE_S)
        if message == nonce:
            return Outcome(True, "passed")
        if status in (TIMED_OUT, 128 + signal.SIGXCPU):
            return Outcome(False, "timed out")
        text = message.decode("utf-8", "replace")
        is_reported = text.startswith(("failed: ", "refused: "))
        return Outcome(False, text if is_reported else f"failed: ended with status {status} before its end was reached")

    def _options(self, folder: str, limits: Limits) -> dict[str, Any]:
        own_user = 0
        if os.getuid() == 0 and self.mode != "limits":
            own_user = _OWN_USERS + os.getpid() * 64 + next(self._numbers) % 64
            os.chown(folder, own_user, own_user)
        processes = limits.processes
        if self.mode != "namespaces" and not own_user:  # threads of this user on this machine count, too
            for facts in (process.info for process in psutil.process_iter(["uids", "num_threads"])):
                is_own = facts["uids"] and facts["uids"].real == os.getuid()
                processes += (facts["num_threads"] or 0) if is_own else 0
        bounds = {
            "RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1),
            "RLIMIT_AS": (limits.memory_bytes,) * 2,
            "RLIMIT_FSIZE": (limits.file_bytes,) * 2,
            "RLIMIT_NPROC": (processes,) * 2,
            "RLIMIT_NOFILE": (limits.files,) * 2,
            "RLIMIT_CORE": (0, 0),
        }
        return {
            "mode": self.mode,
            "nonce": NONCE,
            "timed_out": TIMED_OUT,
            "folder": folder,
            "folder_bytes": limits.folder_bytes,
            "visible": list(_visible()),
            "user": own_user,
            "limits": [(name, *values) for name, values in bounds.items()],
            "wall_s": limits.wall_s,
        }


def _exchange(options: dict[str, Any], job: Any, seconds: float) -> tuple[bytes, int]:
    """The output of a child and its exit status. The child gets this environment and nothing of ours."""
    command = python_command(f"import runpy; runpy.run_path({str(CHILD)!r}, run_name='__main__')")
    command[1:1] = ["-S", "-s", "-B"]
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **one}
    process = subprocess.Popen(
        [*command, json.dumps(options)],
        stdin=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        message = _read(process.stdout.fileno(), time.monotonic() + seconds)
        if message is not None:
            with suppress(subprocess.TimeoutExpired):
                return message, process.wait(_GRACE_S)
        return b"", TIMED_OUT
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def _read(pipe: int, end: float) -> bytes | None:
    """The bytes that come through `pipe` until it is closed; None where it is open at `end`, or they are no message."""
    message = b""
    while (left := end - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        part = os.read(pipe, _LONGEST_MESSAGE)
        message += part
        if not part:
            return message
        if len(message) > _LONGEST_MESSAGE:
            return None
    return None


def _visible() -> Iterator[str]:
    """The paths that Python needs, none inside of another: its own, packages, the system's libraries."""
    packages = [path for path in import_path() if Path(path).name in ("site-packages", "dist-packages")]
    system = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"]
    paths = sorted({*system, sys.base_prefix, sys.base_exec_prefix, *packages} - {"/"})
    last = None
    for path in paths:
        if (last is None or not Path(path).is_relative_to(last)) and Path(path).exists():
            yield path
            last = path


_TIMEOUT_S = 3.0
"""evaluate's default: there by the clock, here of the processor, so that a busy machine changes no score."""

Program = tuple[str, float]
"""A text, and the seconds that it may take."""

Results = tuple[dict[str, Any], dict[int, list[tuple[int, dict[str, Any]]]]]
"""pass@k by name, and by number of the task each program's number with how it ended."""


class CodeEval:
    """The metric. A program is a prediction, a line break, and its reference: equal ones are run once an evaluation."""

    def __init__(self) -> None:
        self._outcomes: dict[Program, Outcome] = {}
        self._noted: list[Program] | None = None

    @cached_property
    def sandbox(self) -> Sandbox:
        """Opened when it is first needed, which takes 0.1 s. Raises `RunError` where programs cannot be confined."""
        if sys.platform != "linux":
            raise RunError(f"'{SWITCH}' = true: code is confined on Linux alone, not on '{sys.platform}'")

        return Sandbox()

    def compute(
        self,
        predictions: Sequence[Sequence[str]],
        references: Sequence[str],
        k: Sequence[int] = (1, 10, 100),
        num_workers: int = 4,
        timeout: float = _TIMEOUT_S,
    ) -> Results:
        """As evaluate's. `num_workers` changes nothing: as many run at once as there are cores. `timeout`: seconds of
        the processor, rounded up."""
        programs = [
            [(f"{answer}\n{test}", timeout) for answer in answers]
            for answers, test in zip(predictions, references, strict=False)
        ]
        if self._noted is not None:
            self._noted += [program for several in programs for program in several]
            return {f"pass@{number}": 0.0 for number in k}, {}
        self.run([program for several in programs for program in several])
        ended = [[self._outcomes[program] for program in several] for several in programs]
        counts = [(len(several), sum(outcome.passed for outcome in several)) for several in ended]
        passes = {
            f"pass@{n}": np.mean([pass_at(n, total, right) for total, right in counts])
            for n in k
            if all(total >= n for total, _ in counts)
        }
        results: Results = passes, defaultdict(list)
        for task, several in enumerate(ended):
            for number, one in enumerate(several):
                how = {"task_id": task, "passed": one.passed, "result": one.result, "completion_id": number}
                results[1][task].append((number, how))
        return results

    def run(self, programs: Sequence[Program]) -> None:
        """Runs those that were not run yet, in parallel."""
        new = [program for program in dict.fromkeys(programs) if program not in self._outcomes]
        for seconds in dict.fromkeys(seconds for _, seconds in new):
            alike = [program for program in new if program[1] == seconds]
            outcomes = self.sandbox.run([text for text, _ in alike], seconds)
            self._outcomes.update(zip(alike, outcomes, strict=True))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it, programs are only noted; they run after it."""
        noted: list[Program] = []
        self._noted = noted
        try:
            yield
        finally:
            self._noted = None
        self.run(noted)

    def forget(self) -> None:
        """Forgets how programs ended."""
        self._outcomes.clear()


CODE_EVAL = CodeEval()
"""The one that tasks get: lm-eval keeps a task's Python, and what that has loaded, as long as the process lives."""
