"""How a command ends: exit status and the one line on stderr."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from olive_ext.cli import main
from olive_ext.errors import ConfigError, IncompleteError, ModelError, RequirementError, WorkerError
from olive_ext.python_processes import ChildProcess


def ends_with(error: BaseException) -> dict[str, Callable[[Namespace], int]]:
    """A stand-in for the command `schema`."""

    def command(arguments: Namespace) -> int:
        raise error

    return {"schema": command}


def test_success_is_0_and_writes_only_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "evaluator"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["properties"]["type"] == {
        "const": "OrtLMEvaluator",
        "description": "This package's evaluator.",
    }
    assert err == ""


@pytest.mark.parametrize("argv", [["--help"], ["evaluate", "--help"], ["check", "--help"], ["--version"]])
def test_help_and_version_are_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert "olive-ext" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "the following arguments are required: COMMAND (see 'olive-ext --help')"),
        (["evaluate"], "the following arguments are required: MODEL (see 'olive-ext evaluate --help')"),
        (
            ["evaluate", "m", "--lim", "3"],
            "unrecognized arguments: --lim 3: did you mean '--limit'? (see 'olive-ext evaluate --help')",
        ),
        (["check", "m", "n", "-o"], "unrecognized arguments: n -o (see 'olive-ext check --help')"),
        (["--odd", "check", "m"], "unrecognized arguments: --odd (see 'olive-ext --help')"),
        (["evaluate", "m"], "missing key 'tasks'"),
        (
            ["mend", "m", "--tasks", "a", "--reference", "r", "--at-most", "1GB"],
            "missing key 'output_dir': give --output",
        ),
        (["evaluate", "m", "--tasks", ","], "'tasks' = []: give a non-empty list, each item a string or a mapping"),
        (
            ["evaluate", "m", "--tasks", "a", "--limit", "x"],
            "'limit' = 'x': give a positive integer or a number between 0 and 1",
        ),
        (
            ["evaluate", "m", "--tasks", "a", "--set", "engine.chunksize=3"],
            "unknown key 'engine.chunksize': did you mean 'chunk_size'?",
        ),
        (["evaluate", "m", "--tasks", "a", "--set", "x"], "'--set' = 'x': give NAME=VALUE"),
        (["check", "no/such/recipe.json"], "cannot read the recipe 'no/such/recipe.json': No such file or directory"),
    ],
)
def test_user_error_is_2_and_one_line(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == f"olive-ext: error: {line}\n"


def test_wrong_choice_is_2_and_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "foo"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(name in err for name in ("foo", "evaluator", "pass", "recipe"))


def test_package_error_is_2_and_its_lines_are_joined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"], ends_with(ModelError("first\nsecond"))) == 2
    assert capsys.readouterr().err == "olive-ext: error: first second\n"


def test_requests_without_an_answer_are_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"], ends_with(IncompleteError("1 request has no answer"))) == 1
    assert capsys.readouterr().err == "olive-ext: error: 1 request has no answer\n"


def test_other_failure_is_1_and_names_the_way_to_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLIVE_EXT_DEBUG", raising=False)
    assert main(["schema"], ends_with(ZeroDivisionError("by zero"))) == 1
    err = capsys.readouterr().err
    assert err == "olive-ext: error: ZeroDivisionError: by zero (OLIVE_EXT_DEBUG=1 shows the traceback)\n"


def test_debug_shows_the_traceback_before_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLIVE_EXT_DEBUG", "1")
    assert main(["schema"], ends_with(ZeroDivisionError("by zero"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "olive-ext: error: ZeroDivisionError: by zero"


def test_interrupt_is_130_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"], ends_with(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "olive-ext: interrupted\n"


def test_sigterm_is_143_and_one_line_and_ends_the_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = tmp_path / "pid"
    script = f"""
import os, signal, time
open({str(pid)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)"""

    def works(_: Namespace) -> int:
        child = ChildProcess(script)
        try:
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


def test_own_warnings_are_shown_once_and_only_while_a_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: Namespace) -> int:
        logging.getLogger("olive_ext.model").warning("no CUDA")
        return 0

    assert main(["schema"], {"schema": command}) == 0
    assert capsys.readouterr().err == "olive-ext: WARNING: no CUDA\n"
    assert logging.getLogger("olive_ext").handlers == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError, 2), (ModelError, 2), (RequirementError, 1), (IncompleteError, 1), (WorkerError, 1), (KeyError, 1)],
)
def test_errors_end_with_the_status_of_their_kind(error: type[Exception], status: int) -> None:
    def command(arguments: Namespace) -> int:
        raise error("x")

    assert main(["schema"], {"schema": command}) == status


def test_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    script = "import sys; from olive_ext.cli import main; sys.exit(main(['schema']))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""


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


@pytest.mark.parametrize("command", ["quickstart", "compare"])
def test_name_that_no_file_can_have_is_a_mistake(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "a" * 5000]) == 2
    line = capsys.readouterr().err
    assert "aaa...' has 5,000 characters: too long for a file's name" in line
    assert len(line) < 200


def test_code_that_ends_the_process_does_not_end_the_command_well(capsys: pytest.CaptureFixture[str]) -> None:
    """With whatever status: `exit()` in the code of a model or a task was 0, and no report."""
    for error in (SystemExit(0), SystemExit(), type("Stop", (BaseException,), {})()):
        assert main(["schema"], ends_with(error)) == 2
        name, line = type(error).__name__, capsys.readouterr().err
        assert line.startswith(f"olive-ext: error: code of a task or a model ended the command: {name}")
        assert (line.count("\n"), "test_main.py, line " in line) == (1, True)
    assert main(["schema"], ends_with(KeyboardInterrupt())) == 130
