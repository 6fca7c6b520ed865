"""Ctrl-C and SIGTERM at any moment, and streams that are closed, full or of few letters: one line each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import importlib.abc, os, signal, sys

class Moment(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)  # what is passed over is looked for again; a second SIGTERM ends at once
            {how}

sys.meta_path.insert(0, Moment())
from olive_ext.cli import main
sys.exit(main())
"""
HOWS = {
    "plain": "os.kill(os.getpid(), NUMBER)",
    "passed over": "\n            try: os.kill(os.getpid(), NUMBER)\n            except: pass",
    "in a callback": "gone = type('Gone', (), {'__del__': lambda self: os.kill(os.getpid(), NUMBER)})(); del gone",
    "an import that fails": (
        "\n            try: os.kill(os.getpid(), NUMBER)\n            except: raise ImportError('no such library')"
    ),
}
MODEL = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
MODULES = ["logging", "olive_ext.cli.commands", "pydantic", "olive_ext.report", "olive_ext.run", "lm_eval"]
"""Of which each is imported by `olive-ext evaluate`, in this order."""


def _program(how: str, module: str, number: int) -> str:
    text = PRELUDE.format(how=HOWS[how]).replace("MODULE", repr(module))
    return text.replace("NUMBER", str(int(number)))


ENDS = [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
MOMENTS = [
    (module, how, *end)
    for module in MODULES
    for how in HOWS
    for end in ENDS
    if module != "logging" or (how == "plain" and end is ENDS[0])  # before anything is caught but Ctrl-C itself
]


def _is_sampled(module: str, how: str, number: int) -> bool:
    """The first moment and the last, both signals, and every way of passing one over, but not all combinations."""
    if how == "plain" and module in ("logging", "lm_eval"):
        return number == (signal.SIGINT if module == "logging" else signal.SIGTERM)
    return (module, number) == ("olive_ext.report", signal.SIGINT)


@pytest.mark.parametrize(
    ("module", "how", "number", "line", "status"),
    [pytest.param(*moment, marks=() if _is_sampled(*moment[:3]) else pytest.mark.long) for moment in MOMENTS],
)
def test_command_that_is_interrupted_while_it_imports_ends_with_one_line(
    module: str, how: str, number: int, line: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "task.yaml").write_text("task: mine\n", encoding="utf-8")
    command = [sys.executable, "-c", _program(how, module, number), "evaluate", str(MODEL)]
    done = subprocess.run([*command, "--tasks", "mine", "--include-path", tmp_path], capture_output=True, text=True)
    says = [f"olive-ext: {line}", f"olive-ext: {line}: nothing is kept without --output"]  # as soon as it evaluates
    assert (done.stderr.rstrip("\n") in says, done.returncode) == (True, status), done.stderr


SEVERAL = """
import importlib.abc, json, os, signal, sys
from olive_ext.cli import main

class Moment(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Moment())
for folder, module, *argv in json.loads(sys.argv[1]):
    os.chdir(folder)
    print("status", main(argv), file=sys.stderr)
"""
EVALUATE = "evaluate {model} --tasks mine --include-path . --output out"
REMEDY = "olive_ext.plugins.diagnose.remedy"
GOES_ON = [
    (EVALUATE, "lm_eval", "out/journal"),
    ("locate {model} --reference {model} --tasks mine --output out", f"{REMEDY}.locate", "out/journal"),
    ("mend {model} --reference {model} --tasks mine --at-most 1GB --output out", f"{REMEDY}.mend", ".out.unfinished"),
    ("run --config recipe.json", "olive_ext.workflow", "out/cache"),
    ("run --config listed.json", "olive_ext.workflow", "out/other"),
    ("locate {model} --reference {model} --tasks mine", f"{REMEDY}.locate", ""),
    (EVALUATE, "lm_eval", "out/absent"),
    (EVALUATE, "lm_eval", "out/empty"),
]
"""Commands, what each imports when it is interrupted, and the folder that an earlier run left."""


def test_interruption_says_with_what_the_same_command_goes_on(tmp_path: Path) -> None:
    """All in one process: an interruption ends a command, and `main` with it."""
    recipe = json.loads((MODEL.parent / "recipe.json").read_text(encoding="utf-8"))
    block = {**recipe["evaluators"]["quickstart"], "include_path": ".", "tasks": ["mine"], "user_script": "task.yaml"}
    recipe |= {"input_model": {"type": "HfModel", "model_path": str(MODEL)}, "evaluators": {"quickstart": block}}
    listed = {**recipe, "engine": {"cache_dir": ["out/other"]}}
    del listed["cache_dir"]
    commands, expected = [], []
    for number, (command, module, kept) in enumerate(GOES_ON):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "task.yaml").write_text("task: mine\n", encoding="utf-8")
        (place / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
        (place / "listed.json").write_text(json.dumps(listed), encoding="utf-8")
        is_there = kept and not kept.endswith(("absent", "empty"))
        if kept and not kept.endswith("absent"):
            folder = place / kept.replace("empty", "journal")
            folder.mkdir(parents=True)
            answers = "what it belongs to\n" + "an answer\n" * bool(is_there)
            (folder / "answers_0.jsonl").write_text(answers, encoding="utf-8")
        commands.append([str(place), module, *command.format(model=MODEL).split()])
        says = "nothing was kept yet" if kept else "nothing is kept without --output"
        says = f"the same command goes on with what is in '{kept}'" if is_there else says
        expected += [f"olive-ext: interrupted: {says}", "status 130"]
    done = subprocess.run([sys.executable, "-c", SEVERAL, json.dumps(commands)], capture_output=True, text=True)
    said = [line.replace(f"{tmp_path / str(at // 2)}/", "") for at, line in enumerate(done.stderr.splitlines())]
    assert said == expected


def _run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = "import sys; from olive_ext.cli import main; sys.exit(main())"
    script = script.replace("olive-ext", f"{sys.executable} -c '{command}'")
    given = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=given, check=False)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        pytest.param("olive-ext schema >&-", 0, marks=pytest.mark.long),
        ("olive-ext schema <&- >&- 2>&-", 0),
        ("olive-ext schema nothing 2>&-", 2),
        pytest.param("olive-ext schema nothing 2>/dev/full", 2, marks=pytest.mark.long),
        ("olive-ext schema 2>&1 | head -1; exit ${PIPESTATUS[0]}", 0),
        ("olive-ext schema nothing 2>&1 | true; exit ${PIPESTATUS[0]}", 2),
    ],
)
def test_closed_streams_change_no_status_and_print_nothing(script: str, status: int) -> None:
    done = _run(script)
    assert done.stderr == ""
    assert done.returncode in (status, 1 if "head" in script else status)  # where the schema does not fit into a pipe


def test_full_disk_behind_stdout_is_one_line() -> None:
    done = _run("olive-ext schema >/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("olive-ext: error: OSError: [Errno 28] No space left on device")
    assert done.stderr.count("\n") == 1


def test_file_that_is_opened_first_never_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    program = """
import os, sys
from olive_ext.cli import main
def show(_):
    with open(sys.argv[2], "wb") as file:
        os.write(1, b"what a library prints")
        file.write(str(file.fileno()).encode())
    return 0
import olive_ext.cli.commands as commands, olive_ext.cli.options as options
commands.schema_command = show
options.parse = lambda argv: type("Arguments", (), {"command": "schema"})
sys.exit(main())
"""
    command = f"{sys.executable} -c '{program}' schema {tmp_path / 'file'} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_letters_that_a_terminal_does_not_have_are_replaced(environment: dict[str, str]) -> None:
    written = ascii("1 ± 2 ↓").replace("'", '"')
    program = "import sys; from olive_ext.cli.exit_status import open_streams; open_streams()"
    done = _run(f"{sys.executable} -c '{program}; print({written}); sys.stderr.write({written})'", **environment)
    assert (done.stdout, done.stderr, done.returncode) == ("1 ? 2 ?\n", "1 ? 2 ?", 0)


FORKED = """
import multiprocessing, sys, time
from olive_ext.cli import main

def child():
    print("ready", flush=True)
    time.sleep(60)

def run(arguments):
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()

sys.exit(main(["schema"], {"schema": run}))
"""


def test_processes_that_a_command_has_forked_end_without_a_word() -> None:
    """lm-eval's bootstrap forks, and Ctrl-C reaches every process of a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count("\n")) == (130, 1)
