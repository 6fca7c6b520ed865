"""A worker that does not come to have its model open: what is said, and with which exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from olive_ext.cli import main
from olive_ext.config import ModelSettings
from olive_ext.errors import WorkerError
from olive_ext.model import resolve
from olive_ext.model.decisions import shared_positions
from olive_ext.model.providers.devices import Device
from olive_ext.session.workers.crew import Crew
from olive_ext.session.workers.pool import ProcessWorker, _job_of
from olive_ext.session.workers.worker import Watchdog, WorkerJob
from tests.exports import genai_export

KILLED = "import os, signal; os.kill(os.getpid(), signal.{})"
TALKS = "import sys; sys.stdout.buffer.write(b'this is no message of ours' * 9); sys.stdout.flush(); sys.stdin.read()"


@pytest.mark.parametrize(
    ("child", "line"),
    [
        (
            KILLED.format("SIGKILL"),
            "worker ended by SIGKILL, as the system does where memory is short while it opened the model: close other "
            "programs, or take less ('engine.num_slots', 'max_length', 'workers', 'reference.mode')",
        ),
        (KILLED.format("SIGSEGV"), "worker ended by SIGSEGV while it opened the model: what it printed is above"),
        ("raise SystemExit(3)", "worker ended with status 3 while it opened the model: what it printed is above"),
        (TALKS, "worker sent what cannot be read"),
    ],
    ids=["SIGKILL", "SIGSEGV", "status", "no message"],
)
def test_child_that_ends_while_it_opens_the_model_is_status_1(
    child: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: Namespace) -> int:
        Crew([ProcessWorker(WorkerJob({}), Watchdog(), child=child)])
        return 0

    assert main(["schema"], {"schema": command}) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"olive-ext: error: {line}")
    assert error.count("\n") == 1


def test_each_of_several_workers_here_plans_with_its_part_of_the_memory() -> None:
    """What a worker resolves has as many positions as the parent foretells."""
    model = resolve(ModelSettings(model=str(genai_export("llama")), deterministic=True, workers={"count": 32}))
    sent = ModelSettings.parse(_job_of(model, None, None, 32).settings)
    alone = ModelSettings.parse(_job_of(model, None, None, 1).settings)
    rooms = [shared_positions(one, model.spec, Device("cpu")) or 0 for one in (alone, sent, model.settings)]
    assert rooms[0] >= 7 * rooms[1] > 0
    assert rooms[1] == rooms[2]


def test_no_room_for_a_process_is_said() -> None:
    worker = ProcessWorker(WorkerJob({}), Watchdog(), child="\0")  # as no system starts
    with pytest.raises(WorkerError, match="worker cannot be started: ValueError: embedded null byte"):
        Crew([worker])


def test_interruption_of_the_terminal_reaches_the_parent_alone(tmp_path: Path) -> None:
    """The child would print a traceback as it imports, and be gone before it is asked to end."""
    program = """
import os, signal, sys, time
from pathlib import Path
from olive_ext.session.workers.pool import _job_of
from olive_ext.session.workers.pool import ProcessWorker
from olive_ext.session.workers.worker import Watchdog, WorkerJob
from tests.exports import genai_export
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
