"""Which backend runs when, processes that fail, and what counts as another answer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks.speed.job import BenchJob, BenchRun, Launcher, Schedule, best
from docs.benchmarks.speed.summary import agreement

BACKENDS = ("olive-ext", "hf", "onnxruntime")
SECONDS = {("hf", 1): 5.0, ("hf", 4): 2.0, ("hf", 8): 3.0}


def measured(backend: str, size: int | None, number: int) -> BenchRun:
    return BenchRun(backend, size, number, seconds={"loglikelihood": SECONDS.get((backend, size or 0), 1.0)})


@pytest.mark.parametrize(
    ("schedule", "failing", "order"),
    [
        (  # later rounds take the fastest batch size
            Schedule(BACKENDS, (1, 4, 8), 2),
            (),
            "olive-ext 0, hf/1 0, hf/4 0, hf/8 0, onnxruntime 0, olive-ext 1, hf/4 1, onnxruntime 1",
        ),
        (Schedule(BACKENDS, (1, 4), 1, probes=True), (), "hf/1 -1, hf/4 -1, olive-ext 0, hf/4 0, onnxruntime 0"),
        (  # what failed is not asked again, and the others go on
            Schedule(BACKENDS, (1, 4), 2, probes=True),
            ("hf",),
            "hf/1 -1, hf/4 -1, olive-ext 0, onnxruntime 0, olive-ext 1, onnxruntime 1",
        ),
        (
            Schedule(BACKENDS, (4,), 3),
            ("onnxruntime", ("hf", 1)),
            "olive-ext 0, hf/4 0, onnxruntime 0, olive-ext 1, hf/4 1, olive-ext 2",
        ),
        (
            Schedule(BACKENDS, (1,), 3, once=["onnxruntime"]),
            (),
            "olive-ext 0, hf/1 0, onnxruntime 0, olive-ext 1, hf/1 1, olive-ext 2, hf/1 2",
        ),
    ],
)
def test_backends_take_turns(schedule: Schedule, failing: tuple[Any, ...], order: str) -> None:
    def launch(backend: str, size: int | None, number: int) -> BenchRun:
        fails = backend in failing or (backend, number) in failing
        return BenchRun(backend, size, number, error="no") if fails else measured(backend, size, number)

    runs = [(run.backend, f"/{run.batch_size}" if run.batch_size else "", run.round) for run in schedule.run(launch)]
    assert ", ".join(f"{name}{size} {number}" for name, size, number in runs) == order


def test_batch_size_that_fails_is_not_the_best() -> None:
    failed = BenchRun("hf", 8, 0, error="out of memory")
    assert best([failed, measured("hf", 1, 0), measured("hf", 4, 0)]) == measured("hf", 4, 0)
    assert best([failed]) is None


JOB = BenchJob("answer", "hf", opening={"batch_size": 4, "num_threads": 2})
ANSWER = """
import os
from olive_ext.python_processes import serve

def measure(job):
    print("on the way")
    threads = os.environ["OMP_NUM_THREADS"]
    return {"seconds": {"loglikelihood": 2.0}, "execution": {"job": job.backend, "threads": threads}, "newer": 1}

serve(measure)
"""


def test_result_is_read_and_the_threads_are_set(tmp_path: Path) -> None:
    run = Launcher(tmp_path, None, ANSWER)(JOB, 3)
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
    assert Launcher(tmp_path, None, script)(JOB).error == error


def test_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    begin = time.monotonic()
    assert Launcher(tmp_path, 1.0, script)(JOB).error == "stopped after 1 s"
    assert time.monotonic() - begin < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_worker_says_what_a_backend_raised(tmp_path: Path) -> None:
    run = Launcher(tmp_path)(BenchJob("answer", "hf", requests=str(tmp_path / "none.json")))
    assert run.error is not None
    assert run.error.startswith("FileNotFoundError")
    assert "Traceback" in next(tmp_path.glob("*.log")).read_text()


GROUPS = [("task", 0), ("task", 0), ("task", 1), ("task", 1)]


def scores(*values: float) -> dict[str, list[Any]]:
    return {"loglikelihood": [[value, False] for value in values]}


LONG, REFERENCE = {"loglikelihood_rolling": [-40000.0]}, scores(-1.0, -2.0, -3.0, -2.5)


@pytest.mark.parametrize(
    ("groups", "found", "reference", "expected"),
    [
        (GROUPS, REFERENCE, REFERENCE, {"max_difference": 0.0, "greedy": [4, 4], "choices": [2, 2], "differs": False}),
        (GROUPS, scores(-1.001, -2.0, -3.0, -2.5), REFERENCE, {"max_difference": 0.001, "differs": False}),
        (GROUPS, scores(-1.5, -2.0, -3.0, -2.5), REFERENCE, {"differs": True}),
        # another choice, however small the difference
        (GROUPS, scores(-1.0, -2.0, -2.499, -2.5), scores(-1, -2, -2.501, -2.5), {"choices": [1, 2], "differs": True}),
        # long texts may differ by a part of their likelihood
        ([], {"loglikelihood_rolling": [-40001.0]}, LONG, {"differs": False}),
        ([], {"loglikelihood_rolling": [-40010.0]}, LONG, {"differs": True}),
        ([], {"generate_until": ["a", "b"]}, {"generate_until": ["a", "c"]}, {"texts": [1, 2], "differs": True}),
        # requests of one choice
        ([("lambada", 0), ("lambada", 1)], scores(-1.0, -2.0), scores(-1.0, -2.0), {"choices": None}),
    ],
)
def test_answers_that_differ(groups: Any, found: Any, reference: Any, expected: dict[str, Any]) -> None:
    compared = agreement(groups, found, reference)
    assert {key: compared.get(key) for key in expected} == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()
    }
