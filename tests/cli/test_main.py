"""How a command ends: exit status and one line on stderr. Names on a hub that does not answer, and the mistakes of
`tests/mistakes/table.py`, are told before heavy imports. What `olive-ext quickstart` copies, and refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from olive_ext.check import check_recipe
from olive_ext.cli import main
from olive_ext.cli.commands import IN_CLONE
from olive_ext.cli.exit_status import DEBUG_VARIABLE, command
from olive_ext.errors import ConfigError, IncompleteError, ModelError, RequirementError, WorkerError
from olive_ext.python_processes import ChildProcess
from tests.mistakes.early import told
from tests.refusals import assert_says, refused, tells


def ends_with(error: BaseException) -> dict[str, Callable[[Namespace], int]]:
    """A stand-in for the command `schema`."""

    def command(arguments: Namespace) -> int:
        raise error

    return {"schema": command}


def test_success_help_and_version_are_0_and_write_only_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "evaluator"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["properties"]["type"] == {
        "const": "OrtLMEvaluator",
        "description": "This package's evaluator.",
    }
    assert err == ""
    for argv in (["--help"], ["evaluate", "--help"], ["check", "--help"], ["--version"]):
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert "olive-ext" in out
        assert err == ""


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("x"), 2, "error: x"),
        (ModelError("first\nsecond"), 2, "error: first second"),
        (RequirementError("x"), 1, "error: x"),
        (IncompleteError("lost"), 1, "error: lost"),
        (WorkerError("x"), 1, "error: x"),
        (
            ZeroDivisionError("by zero"),
            1,
            f"error: ZeroDivisionError: by zero ({DEBUG_VARIABLE}=1 shows the traceback)",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_error_ends_with_the_status_of_its_kind_and_one_line(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    assert main(["schema"], ends_with(error)) == status
    assert capsys.readouterr().err == f"olive-ext: {line}\n"
    if isinstance(error, ZeroDivisionError):
        monkeypatch.setenv(DEBUG_VARIABLE, "1")
        assert main(["schema"], ends_with(error)) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("Traceback")
        assert lines[-1] == "olive-ext: error: ZeroDivisionError: by zero"


def test_name_of_a_file_that_is_too_long_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("quickstart", "compare"):
        assert main([name, "a" * 5000]) == 2
        line = capsys.readouterr().err
        assert tells(line, "aaa...' 5,000")
        assert len(line) < 200


def test_sigterm_is_143_and_one_line_and_ends_the_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid, started = tmp_path / "pid", tmp_path / "started"
    script = f"""
import os, signal, time
open({str(pid)!r}, "w").write(str(os.getpid()))
while not os.path.exists({str(started)!r}):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)"""

    def works(_: Namespace) -> int:
        child = ChildProcess(script)
        try:
            started.touch()
            child.receive()
        finally:
            child.stop()
        return 0

    before = signal.getsignal(signal.SIGTERM)
    assert main(["schema"], {"schema": works}) == 143
    assert capsys.readouterr().err == "olive-ext: terminated\n"
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_importing_the_package_and_the_command_line_brings_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "lm_eval", "olive", "onnxruntime", "onnx", "datasets", "numpy", "rich"]
    script = f"""
import sys, time
begin = time.process_time()
import olive_ext
seconds = time.process_time() - begin
import olive_ext.cli
print([name for name in {heavy} if name in sys.modules], seconds < 0.5)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"


def test_code_that_ends_the_process_does_not_end_the_command_well(capsys: pytest.CaptureFixture[str]) -> None:
    """With whatever status: `exit()` in the code of a model or a task was 0, and no report."""
    for error in (SystemExit(0), SystemExit(), type("Stop", (BaseException,), {})()):
        assert main(["schema"], ends_with(error)) == 2
        name, line = type(error).__name__, capsys.readouterr().err
        assert line.startswith("olive-ext: error: ")
        assert name in line
        assert (line.count("\n"), "test_main.py, line " in line) == (1, True)
    assert main(["schema"], ends_with(KeyboardInterrupt())) == 130


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a hub that takes no connection and refuses none, as behind a firewall: its queue is full."""
    with ExitStack() as open_sockets:
        server = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            client = open_sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing() -> str:
    """The address of a hub where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


NAME = "some-owner/some-model"
OF_RECIPE = ("run --config recipe.json", {"input_model": {"type": "HfModel", "model_path": NAME}})


@pytest.mark.parametrize(
    ("hub", "reason", "given"),
    [
        pytest.param("silent", "127.0.0.1 1", [f"evaluate {NAME} TASKS"], marks=pytest.mark.long),
        ("refusing", "refused", [f"evaluate MODEL TASKS --reference {NAME}", OF_RECIPE]),
        ("offline", "HF_HUB_OFFLINE", [f"evaluate MODEL TASKS --set tokenizer={NAME}"]),
    ],
)
def test_name_on_a_hub_that_does_not_answer(
    tmp_path: Path, hub: str, reason: str, given: list[Any], request: pytest.FixtureRequest
) -> None:
    network = {"HF_HUB_OFFLINE": "1"} if hub == "offline" else {"HF_ENDPOINT": request.getfixturevalue(hub)}
    found = told(tmp_path, given, HF_HOME=str(tmp_path), NO_PROXY="127.0.0.1", **network)
    assert len(found) == len(given)
    for error in found:
        assert_says(error, "needs_network", holds=(f"'{NAME}'", *reason.split()))
        assert not error.imported


def test_help_of_run_names_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: olive-ext run ")
    assert "--list_required_packages" in said


def test_working_directory_that_is_gone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check torch's libraries end the process: "Cannot load libtorch_cpu.so", no word of the cause."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with refused(ConfigError, "not_found"):
        command(["evaluate", "m", "--tasks", "a"], None)


def paths(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_copy_is_whole_and_its_recipe_is_valid_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "with a space" / "try"
    assert main(["quickstart", str(target)]) == 0
    assert capsys.readouterr().out == f"cd '{target}' && olive run --config recipe.json\n"
    assert [entry.name for entry in target.parent.iterdir()] == ["try"]
    assert {"recipe.json", "olive_ext_plugin.py", "model/model.safetensors", "model/config.json"} <= paths(target)
    assert not {path for path in paths(target) if path.startswith("make/")}
    model = "model/model.safetensors"
    assert (target / model).read_bytes() == (IN_CLONE / model).read_bytes()
    assert "recipes/" not in (target / "recipe.json").read_text(encoding="utf-8")
    assert json.loads((target / "recipe.json").read_text(encoding="utf-8"))["input_model"]["model_path"] == "model"
    monkeypatch.chdir(target)
    assert check_recipe("recipe.json").problems == []


def test_empty_folder_is_taken_and_any_other_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", str(tmp_path / "new")]) == 0
    (tmp_path / "empty").mkdir()
    assert main(["quickstart", str(tmp_path / "empty")]) == 0
    before = paths(tmp_path)
    (tmp_path / "file").touch()
    for taken in ("new", "file"):
        capsys.readouterr()
        assert main(["quickstart", str(tmp_path / taken)]) == 2
        assert capsys.readouterr().err.startswith(f"olive-ext: error: 'folder' = '{tmp_path / taken}': ")
    assert paths(tmp_path) == before | {"file"}
