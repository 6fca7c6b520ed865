"""Answers of every kind in the sandbox: right, wrong, and those that would harm. Each is a body for `def add(a, b):`,
with the asserts behind it, as tasks of code are written."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from olive_ext.errors import RunError
from olive_ext.plugins.code.code_eval import Limits, Outcome, Sandbox
from tests.refusals import refused

TEST = "\nassert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
RIGHT = "def add(a, b):\n    return a + b\n"

PASSED = {
    "right": RIGHT,
    "prints": RIGHT + "print('passed')",
    "uses_numpy": "import numpy as np\ndef add(a, b):\n    return int(np.add(a, b))",
    "writes_in_its_folder": RIGHT + "open('note', 'w').write('x')",
    "leaves_a_process": RIGHT + "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(600)",
    "closes_its_output": RIGHT + "import os, sys\nsys.stdout.close()\nos.close(2)",
    "is_no_main_program": RIGHT + "if __name__ == '__main__':\n    raise ValueError",
}
FAILED: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "wrong": ("def add(a, b):\n    return a - b", "failed: "),
    "no_python": ("def add(a, b) return", "failed: "),
    "raises": ("raise ValueError('as it likes')", "failed: as it likes"),
    "asks_for_input": (RIGHT + "input()", "failed: "),
    "exits_early": ("import os\nos._exit(0)", "failed: "),
    "exits_politely": ("import sys\nsys.exit(0)", "failed: 0"),
    "prints_the_verdict": ("print('passed')\nimport os\nos.write(1, b'passed')\nos._exit(0)", "failed: ended"),
    "writes_to_every_file": (
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'passed' * 9)\n    except OSError:\n"
        "        pass\nos._exit(0)",
        "failed: ended",
    ),
    "floods_every_file": (
        "import os\nfor fd in range(64):\n    try:\n        while fd != 0:\n            os.write(fd, bytes(9999))\n"
        "    except OSError:\n        pass",
        "timed out",
    ),
    "closes_everything": (RIGHT + "import os\nos.closerange(0, 64)", "failed: ended"),
    "eats_memory": ("x = bytearray(1 << 33)", "failed: "),
    "eats_memory_slowly": ("x = []\nwhile True:\n    x.append(bytearray(1 << 26))", "failed: "),
    "fills_the_disk": ("for i in range(99):\n    open(str(i), 'wb').write(bytes(4 << 20))", "failed: "),
    "writes_one_large_file": ("open('x', 'wb').write(bytes(1 << 25))", "failed: [Errno 27]"),
    "opens_many_files": ("x = [open('/dev/null') for i in range(999)]", "failed: [Errno 24]"),
    "loops": ("while True:\n    pass", "timed out"),
    "sleeps": ("import time\ntime.sleep(600)", "timed out"),
    "forks_without_end": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "timed out",
    ),
    "ignores_signals": (
        "import signal\nfor one in set(signal.Signals) - {9, 19}:\n    try:\n"
        "        signal.signal(one, signal.SIG_IGN)\n    except OSError:\n        pass\nwhile True:\n    pass",
        ("failed: ended", "timed out"),
    ),
    "looks_for_objects": ("import gc\nx = [o for o in gc.get_objects()]", "failed: gc.get_objects "),
}
CONFINED = {
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
    "reads_a_file": "raise ValueError(open({secret!r}).read())",
    "reads_the_environment": "import os\nraise ValueError([open(f'/proc/{{p}}/environ').read() for p in "
    "(os.getppid(), {pid})])",
    "has_an_environment": "import os\nraise ValueError(os.environ.get('OLIVE_EXT_TEST_SECRET'))",
    "kills": "import os\nos.kill({pid}, 9)",
    "kills_all": "import os\nos.kill(-1, 9)",
    "removes_a_file": "import os\nos.remove({secret!r})",
}
SEARCHING = """
import gc, sys, __main__
stack, seen, found = [vars(__main__), sys.modules], set(), []
frame = sys._getframe()
while frame:
    stack += [frame, frame.f_locals, frame.f_globals]
    frame = frame.f_back
while stack:
    item = stack.pop()
    if id(item) not in seen:
        seen.add(id(item))
        found += [item] if isinstance(item, bytes) and {marker!r}[::-1] in item else []
        stack += gc.get_referents(item)
raise ValueError(f"{{len(seen) > 1000}}, {{len(found)}}")
"""


class Ran(NamedTuple):
    """What became of every answer, and of the machine meanwhile."""

    outcomes: dict[str, Outcome]
    sandbox: Sandbox
    secret: Path
    connections: int


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    secret = tmp_path_factory.mktemp("secret") / "file"
    secret.write_text("hidden words")
    os.environ["OLIVE_EXT_TEST_SECRET"] = "hidden words"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        names = {"port": server.getsockname()[1], "secret": str(secret), "pid": os.getpid()}
        confined = {name: text.format(**names) for name, text in CONFINED.items()}
        answers = {**PASSED, **{name: text for name, (text, _) in FAILED.items()}, **confined}
        slow = ["floods_every_file", "loops", "sleeps", "forks_without_end", "ignores_signals"]
        order = [name for name in answers if name not in slow] + slow
        programs = [answers[name] + "\n" + TEST for name in order]
        sandbox = Sandbox(Limits(cpu_s=3, memory_bytes=1 << 29))
        outcomes = sandbox.run(programs[: -len(slow)]) + Sandbox(Limits(cpu_s=1, wall_s=1)).run(programs[-len(slow) :])
        number = 0
        try:
            server.accept()
            number += 1
        except BlockingIOError:
            pass
    yield Ran(dict(zip(order, outcomes, strict=True)), sandbox, secret, number)
    del os.environ["OLIVE_EXT_TEST_SECRET"]


def test_packages_that_lie_in_tmp_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment may stand in /tmp, where the sandbox has a folder of its own."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "in_tmp_alone.py").write_text("def add(a, b):\n    return a + b\n")
    monkeypatch.syspath_prepend(str(packages))
    assert Sandbox().run(["from in_tmp_alone import add" + TEST]) == [(True, "passed")]


@pytest.mark.parametrize("name", PASSED)
def test_right_answer_passes_whatever_else_it_does_to_itself(ran: Ran, name: str) -> None:
    assert ran.outcomes[name] == (True, "passed")


@pytest.mark.parametrize("name", FAILED)
def test_answer_that_does_not_reach_its_end_fails_alone(ran: Ran, name: str) -> None:
    outcome = ran.outcomes[name]
    assert not outcome.passed
    assert outcome.result.startswith(FAILED[name][1])


@pytest.mark.parametrize("name", CONFINED)
def test_answer_reaches_nothing_outside(ran: Ran, name: str) -> None:
    if ran.sandbox.mode != "namespaces":
        pytest.skip(f"programs are confined by {ran.sandbox.description} here")
    outcome = ran.outcomes[name]
    assert not outcome.passed
    assert outcome.result.startswith("failed: ")
    assert "hidden" not in outcome.result


def test_nothing_is_left_and_nothing_was_touched(ran: Ran) -> None:
    assert ran.secret.read_text() == "hidden words"
    assert ran.connections == 0
    end = time.monotonic() + 5
    while (left := _left()) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def _left() -> list[str]:
    """Processes and folders of sandboxes."""
    commands = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    folders = [str(path) for path in Path("/tmp").glob("olive_ext_code_*")]
    return [*folders, *(" ".join(words) for words in commands if any("olive_ext_code_" in word for word in words))]


def test_what_ends_a_program_is_in_no_frame_and_no_object_that_it_reaches() -> None:
    """The text of the program travels with the nonce: where the one is found the other is."""
    marker = b"a marker of this program"
    text = f"# {marker.decode()}" + SEARCHING.format(marker=marker[::-1])
    assert Sandbox().run([text]) == [(False, "failed: True, 0")]


def test_machine_without_a_way_to_confine_is_refused_with_the_reasons() -> None:
    """Root alone may become another user, and is the one user without a limit on processes."""
    mode = "limits" if os.getuid() == 0 else "user"
    with refused(RunError, "failed", holds=mode):
        Sandbox(modes=[mode])


def test_order_is_that_of_the_programs_and_none_are_none() -> None:
    sandbox = Sandbox()
    programs = [f"assert {number} % 3" for number in range(12)]
    assert [outcome.passed for outcome in sandbox.run(programs)] == [bool(number % 3) for number in range(12)]
    assert sandbox.run([]) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["user", "limits"])
def test_processes_in_sessions_of_their_own_end_without_namespaces(mode: str) -> None:
    try:
        sandbox = Sandbox(Limits(cpu_s=1, wall_s=2), modes=[mode])
    except RunError as error:
        pytest.skip(str(error))
    forking = "import os\nwhile True:\n    try:\n        os.fork() and os.setsid()\n    except OSError:\n        pass"
    programs = [
        forking,
        RIGHT + "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(600)",
        RIGHT + TEST,
    ]
    assert [outcome.result for outcome in sandbox.run(programs)] == ["timed out", "passed", "passed"]
    assert _left() == []
