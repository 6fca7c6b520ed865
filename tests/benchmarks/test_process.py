from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from docs.benchmarks.speed.job import BenchJob, Launcher

JOB = BenchJob("answer", "hf", opening={"batch_size": 4, "num_threads": 2})


def launcher(tmp_path: Path, script: str, timeout: float | None = None) -> Launcher:
    return Launcher(tmp_path, timeout, script)


def test_result_is_read_and_the_threads_are_set(tmp_path: Path) -> None:
    script = """
import os
from olive_ext.python_processes import serve

def measure(job):
    print("on the way")
    threads = os.environ["OMP_NUM_THREADS"]
    return {"seconds": {"loglikelihood": 2.0}, "execution": {"job": job.backend, "threads": threads}, "newer": 1}

serve(measure)
"""
    run = launcher(tmp_path, script)(JOB, 3)
    assert (run.backend, run.batch_size, run.round, run.error, run.in_model) == ("hf", 4, 3, None, 2.0)
    assert run.execution == {"job": "hf", "threads": "2"}
    assert run.seconds_total > 0
    assert next(tmp_path.glob("*.log")).read_text() == "on the way\n"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL, as the system does where memory is short"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("import sys; sys.exit('no such thing')", "ended with status 1: no such thing"),
    ],
)
def test_process_that_dies_is_a_line(tmp_path: Path, script: str, error: str) -> None:
    assert launcher(tmp_path, script)(JOB).error == error


def test_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    begin = time.monotonic()
    assert launcher(tmp_path, script, 1.0)(JOB).error == "stopped after 1 s"
    assert time.monotonic() - begin < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_worker_says_what_a_backend_raised(tmp_path: Path) -> None:
    run = Launcher(tmp_path)(BenchJob("answer", "hf", requests=str(tmp_path / "none.json")))
    assert run.error is not None
    assert run.error.startswith("FileNotFoundError")
    assert "Traceback" in next(tmp_path.glob("*.log")).read_text()
