"""A worker in a process: crashes, kills and hangs are told apart, and it never outlives its parent. A worker that
does not come to have its model open: what is said, and with which exit status."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import olive_ext
from olive_ext import python_processes
from olive_ext.cli import main
from olive_ext.config import ModelSettings
from olive_ext.engine.requests import Lost, Request, Result
from olive_ext.errors import LostRequestsError, MismatchError, TaskError, WorkerError
from olive_ext.model import resolve
from olive_ext.model.decisions import shared_positions
from olive_ext.model.providers.devices import Device
from olive_ext.session.requests import GenerationRequest
from olive_ext.session.workers.crew import Crew, _job_of
from olive_ext.session.workers.worker import OWN, ProcessWorker, ServedModel, Watchdog, WorkerJob, WorkerLostError
from tests.engine.fake_runner import oracle
from tests.exports import genai_export
from tests.refusals import refused, tells
from tests.session.workers.fake_model import CHILD, CRASH, FAIL, HANG, SLOW

GOOD = Request((1, 2, 3, 4), 2)


def token(number: int) -> Request:
    return replace(GOOD, tokens=(1, number, 3, 4))


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessWorker]:
    """Of all tests below that are given one: it starts for half a second."""
    made = ProcessWorker(WorkerJob({}), Watchdog(3), child=CHILD)
    yield made
    made.stop()


@pytest.fixture
def served(worker: ProcessWorker) -> ProcessWorker:
    """Running, whatever the test before it left."""
    if worker.pid is None or not psutil.pid_exists(worker.pid):
        worker.open()
    return worker


def test_chunks_are_run_and_errors_come_back_whole(served: ProcessWorker) -> None:
    pid, reply = served.pid, served.run(OWN, [GOOD])
    (result,) = reply.results
    assert reply.execution == {"pid": pid}
    assert result.logprobs == pytest.approx(oracle(GOOD).logprobs)
    with refused(TaskError, "contradiction", "luck", 7, holds="no such luck"):
        served.run(OWN, [token(FAIL)])
    served.release_memory(OWN)
    assert served.pid == pid


@pytest.mark.parametrize(("tokens", "reason"), [(CRASH, "SIGSEGV"), (HANG, "hung")], ids=["crash", "hang"])
def test_a_lost_worker_says_how(served: ProcessWorker, tokens: int, reason: str) -> None:
    with pytest.raises(WorkerLostError, match=reason):
        served.run(OWN, [token(tokens)])
    served.open()
    assert served.run(OWN, [GOOD]).results


@pytest.mark.parametrize("crashes", [False, pytest.param(True, marks=pytest.mark.long)])  # test_crew.py crashes fakes
def test_a_killed_worker_costs_the_chunk_in_flight_only(
    crashes: bool, worker: ProcessWorker, caplog: pytest.LogCaptureFixture
) -> None:
    before = worker.pid
    worker.stop()
    assert before is None or not psutil.pid_exists(before)
    crew = Crew([worker])
    assert worker.pid is not None
    timer = threading.Timer(0.5, os.kill, (worker.pid, signal.SIGKILL))
    timer.start()
    slow = [token(SLOW), GOOD, GOOD]  # the largest chunk, so it is the one in flight
    found: dict[int, Any] = dict(crew.run(OWN, [slow, [GOOD, token(CRASH) if crashes else GOOD]]))
    timer.join()
    lost = [result for result in found[0] + found[1] if isinstance(result, Lost)]
    assert [type(result) for result in found[0] + found[1]] == [Result] * 4 + [Lost if crashes else Result]
    assert ["SIGSEGV" in result.reason for result in lost] == [True] * crashes
    assert "SIGKILL" in caplog.text
    assert crew.num_lost == 1 + 3 * crashes, "the kill, and a chunk that crashes: once, again, its second request alone"
    crew.stop()


@pytest.mark.parametrize(
    "doing", [pytest.param(SLOW, id="busy", marks=pytest.mark.long), pytest.param(None, id="idle")]
)
def test_a_worker_ends_with_its_parent(doing: int | None, tmp_path: Path) -> None:
    run = f"worker.run('own', [Request((1, {doing}, 3), 1)])" if doing else "time.sleep(60)"
    program = f"""
import time
from pathlib import Path
from olive_ext.engine.requests import Request
from olive_ext.session.workers.worker import ProcessWorker, Watchdog, WorkerJob
from tests.session.workers.fake_model import CHILD
worker = ProcessWorker(WorkerJob({{}}), Watchdog(), child=CHILD)
worker.open()
Path({str(tmp_path / "pid")!r}).write_text(str(worker.pid))
{run}
"""
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    psutil.wait_procs(
        [psutil.Process(pid) for pid in [int((tmp_path / "pid").read_text())] if psutil.pid_exists(pid)], 5
    )
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_real_model_in_a_process_gives_the_bytes_of_one_that_is_not(tmp_path: Path) -> None:
    path = genai_export("llama")
    pairs = [([7 + number % 9, *range(10, 60 + number)], [5 + number, 6]) for number in range(30)]
    prompts = [GenerationRequest(context, 8, stop="e", temperature=0.5, seed=3) for context, _ in pairs]
    found = []
    for isolation in ("none", "process"):
        with olive_ext.open(path, engine={"num_threads": 1}, isolation=isolation, deterministic=True) as session:
            session.keep_answers(tmp_path / isolation)
            found.append((session.loglikelihood(pairs), session.generate(prompts)))
            assert [key for key, _ in session.generate_continuous([("a", prompts[0])])] == ["a"]
            assert session.counters.requests == 61
            for worker in session.executor._crew.workers if isolation == "process" else ():
                loaded = {Path(one.path).name for one in psutil.Process(worker.pid).memory_maps()}
                assert not {name for name in loaded if "torch" in name}  # 2 s of every command
    assert found[0] == found[1]


@pytest.mark.long
def test_a_worker_repeats_no_warning_of_resolving_the_model(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with olive_ext.open(genai_export("llama"), isolation="process", max_length=10**6):
        assert "max_length" in caplog.text
    assert "max_length" not in capfd.readouterr().err


def test_lost_requests_are_raised_behind_all_others() -> None:
    error = LostRequestsError({3: "each worker that ran it hung", 5: "so did this"})
    assert tells(error, "3 1 hung")


KILLED = "import os, signal; os.kill(os.getpid(), signal.{})"
TALKS = "import sys; sys.stdout.buffer.write(b'this is no message of ours' * 9); sys.stdout.flush(); sys.stdin.read()"
SERVES = TALKS.replace("(b'", "(b'\\0olive_ext\\n' + b'")


@pytest.mark.parametrize(
    ("child", "words"),
    [
        (KILLED.format("SIGKILL"), "SIGKILL 'engine.num_slots' 'max_length' 'workers' 'reference.mode'"),
        (KILLED.format("SIGSEGV"), "SIGSEGV"),
        ("raise SystemExit(3)", "status 3"),
        (SERVES, "read"),
        pytest.param(TALKS, "3 s", marks=pytest.mark.long),
        ("import sys; sys.stdin.read()", "3 s"),
    ],
    ids=["SIGKILL", "SIGSEGV", "status", "no message", "talks", "silent"],
)
def test_child_that_ends_while_it_opens_the_model_is_status_1(
    child: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_processes, "START_S", 3.0)

    def command(_: Namespace) -> int:
        Crew([ProcessWorker(WorkerJob({}), Watchdog(), child=child)])
        return 0

    assert main(["schema"], {"schema": command}) == 1
    error = capsys.readouterr().err
    assert error.startswith("olive-ext: error: worker ")
    assert tells(error, words)
    assert error.count("\n") == 1


def test_each_of_several_workers_here_plans_with_its_part_of_the_memory() -> None:
    """What a worker resolves has as many positions as the parent foretells."""
    model = resolve(ModelSettings(model=str(genai_export("llama")), deterministic=True, workers={"count": 32}))
    sent = ModelSettings.parse(_job_of(model, None, None, 32).settings)
    alone = ModelSettings.parse(_job_of(model, None, None, 1).settings)
    rooms = [shared_positions(one, model.spec, Device("cpu")) or 0 for one in (alone, sent, model.settings)]
    assert rooms[0] >= 7 * rooms[1] > 0
    assert rooms[1] == rooms[2]


def test_a_worker_that_comes_later_refuses_changed_files(tmp_path: Path) -> None:
    """Else answers of two models would be in one journal, under the first one's digest."""
    folder = Path(shutil.copytree(genai_export("llama"), tmp_path / "model"))
    model = resolve(ModelSettings(model=str(folder), isolation="process"))
    job = _job_of(model, model, None, 1)
    config = folder / "genai_config.json"
    config.write_text(config.read_text().replace('"eos_token_id"', '"eos_token_id" '))
    for changed in (job, replace(job, digests=(resolve(model.settings).digest, model.digest))):
        with refused(MismatchError, "contradiction", holds=str(folder)):
            ServedModel().open(changed)


def test_no_room_for_a_process_is_said() -> None:
    worker = ProcessWorker(WorkerJob({}), Watchdog(), child="\0")  # as no system starts
    with refused(WorkerError, "worker", holds="ValueError: embedded null byte"):
        Crew([worker])


def test_interruption_of_the_terminal_reaches_the_parent_alone(tmp_path: Path) -> None:
    """The child would print a traceback as it imports, and be gone before it is asked to end."""
    program = """
import os, signal, sys, time
from pathlib import Path
from olive_ext.session.workers.worker import ProcessWorker, Watchdog, WorkerJob
from tests.session.workers.fake_model import CHILD
signal.signal(signal.SIGINT, lambda *_: None)
child = "import os; os.write(2, b'begins'); " + CHILD
worker = ProcessWorker(WorkerJob({}), Watchdog(), child=child)
import threading
threading.Timer(0.5, os.killpg, (os.getpgid(0), signal.SIGINT)).start()
worker.open()
time.sleep(0.6)
worker.stop()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, start_new_session=True, check=True)
    assert done.stderr == b"begins"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
