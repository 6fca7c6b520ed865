"""Every command in the documentation: it is run by a test, here or where `ELSEWHERE` says, or its block is marked.

A block's mark stands behind its language: ```sh gpu, ```sh network, ```sh hours. Quick: each command's arguments are
understood and its files are there. Long: the blocks of shell and Python of some pages are run, in their order, in a
copy of what git has.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli.options import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "recipes").rglob("*.md"))
PROGRAMS = ("olive-ext", "olive", "lm_eval", "python", "python3", "pip", "bash", "az")
MARKS = ("gpu", "network", "hours")
FIRST = "olive run --config recipes/quickstart/recipe.json"
"""What the README's first command ends with, and the pages that are run begin with."""

RUN_HERE = {
    "docs/start/olive.md": "out/report/int4/report.html",
    "docs/start/shell.md": "out/compared/compare.html",
    "docs/locate.md": "out/fitted/bill.html",
    "docs/start/python.md": "out/from_python/report.html",
    "docs/tasks.md": "out/sampled/report.html",
    "docs/start/lm_eval.md": "out/quickstart/model.onnx",
    "recipes/azureml/README.md": "out/azureml/quickstart/job.yml",
}
"""Pages whose blocks are run below, as they stand, behind the first command, and what they leave."""

ELSEWHERE = {
    "python3 -m venv": (".ci/run", "README.md"),  # the README's two commands, word for word
    "pip install": (".ci/run", "pip install"),
    "bash .ci/run": (".ci/run", "run readme"),
    FIRST: (".ci/run", "README.md"),
    "olive run --config recipes/chains/block_rtn_int4_b32.json": (
        "tests/recipes/test_chains.py",
        '"block_rtn_int4_b32":',
    ),
    "olive run --config recipes/search/recipe.json": ("tests/recipes/test_search.py", "output = run(recipe)"),
    "olive-ext run --config recipes/mend/": ("tests/plugins/diagnose/test_passes.py", '"run", "--config"'),
    "olive-ext run --config recipes/vision/": ("tests/recipes/test_vision.py", '"run", "--config"'),
    "olive-ext run --config recipes/speech/": ("tests/recipes/test_speech.py", "run_recipe("),
    "olive-ext schema recipe": ("tests/cli/test_main.py", '"schema"'),
    "python recipes/quickstart/make/make_data.py": ("tests/recipes/test_quickstart.py", "make_data"),
    "python recipes/gate/make.py": ("tests/plugins/gate/test_gate_recipe.py", '"make.py"'),
    "python -m mkdocs build": ("tests/test_site.py", "mkdocs"),
    "olive-ext evalution": ("tests/plugins/suites/evalution/test_runs.py", "evalution"),
    "olive-ext quickstart": (".ci/wheel.sh", "quickstart"),
    "olive-ext check FLOAT --against": ("tests/plugins/diagnose/conversion/test_checkpoint.py", '"--against"'),
    "olive-ext compare out/float out/int4": ("docs/start/shell.md", "olive-ext compare out/float out/int4"),
}
"""What a command begins with; the file that runs it, and what stands in that file."""


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, mark and text of each fenced block."""
    yield from re.findall(r"^```(\w*) ?(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def commands() -> Iterator[tuple[str, str, str]]:
    """Page, mark and command of each line in a block of shell; of other blocks only lines that begin with a program."""
    for page in PAGES:
        for language, mark, block in blocks(page):
            for line in block.splitlines():
                line = line.removeprefix("$ ").strip()
                is_shell = language in ("sh", "bash", "console")
                if line.split(" ")[0] in PROGRAMS and (is_shell or not language):
                    yield page.relative_to(ROOT).as_posix(), mark, re.split(r"\s+#\s", line)[0].strip()


COMMANDS = list(commands())


def test_documentation_has_commands_and_every_mark_is_known() -> None:
    assert len(COMMANDS) > 20
    assert {mark for _, mark, _ in COMMANDS} <= {"", *MARKS}


@pytest.mark.parametrize(
    ("page", "mark", "command"), COMMANDS, ids=[f"{page}: {line[:60]}" for page, _, line in COMMANDS]
)
def test_command_is_run_by_a_test_or_marked(page: str, mark: str, command: str) -> None:
    if mark or (page in RUN_HERE and not command.startswith(("python3 -m venv", "az"))):
        return
    where = next((place for start, place in ELSEWHERE.items() if command.startswith(start)), None)
    assert where is not None, f"{page} has a command that no test runs: {command}"
    assert where[1] in (ROOT / where[0]).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", sorted({line for _, _, line in COMMANDS if line.startswith("olive-ext ")}))
def test_arguments_are_understood(command: str) -> None:
    words = shlex.split(command.split(" > ")[0].replace("[", "").replace("]", ""))
    assert parse(words[1:]).command == words[1]


@pytest.mark.parametrize(
    "command", sorted({line for _, _, line in COMMANDS if re.match(r"python |olive run|bash ", line)})
)
def test_files_are_there(command: str) -> None:
    files = [word for word in shlex.split(command) if word.startswith(("recipes/", "docs/", ".ci/"))]
    assert [file for file in files if not (ROOT / file).exists()] == []


def within(folder: Path) -> dict[str, str]:
    """The environment of commands in a clone."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": programs, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has, and what the README's first command leaves beside it."""
    folder = tmp_path_factory.mktemp("clone")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    done = subprocess.run(["bash", "-c", FIRST], cwd=folder, env=within(folder))
    assert done.returncode == 0
    return folder


IMPORTED = ("torch", "transformers", "lm_eval.tasks", "onnxruntime", "olive.workflows", "olive_ext.run")
"""What each command would import, for seconds: commands are forks of a process that has."""

Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(clone: Path) -> Iterator[Run]:
    """Runs `python ARGUMENTS` in the clone: as documented, to status 0 or that of a verdict."""
    command = [sys.executable, "-m", "tests.export_maker", *IMPORTED]
    log, errors = clone.parent / "log", clone.parent / "errors"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=clone, env=within(clone), **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(*arguments: str) -> None:
            request = {"arguments": arguments, "log": str(log), "errors": str(errors)}
            print(json.dumps(request), file=process.stdin, flush=True)
            status, said = int(process.stdout.readline()), log.read_text(encoding="utf-8")
            is_verdict = re.search(VERDICTS.get(status, "(?!)"), said)
            assert status == 0 or is_verdict, f"{arguments}\n{said[-1000:]}\n{errors.read_text()[-3000:]}"

        yield run
        process.stdin.close()


OURS = "import sys; from olive_ext.cli import main; sys.exit(main())"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("page", "left"), sorted(RUN_HERE.items()))
def test_page_runs_as_it_stands(page: str, left: str, clone: Path, run: Run) -> None:
    for language, mark, block in blocks(ROOT / page):
        if language == "python" and not mark:
            run("-c", block)
        for line in block.splitlines() if language in ("sh", "bash") and not mark else ():
            if line.split(" ")[0] in PROGRAMS and not line.startswith(("python3 -m venv", "az", FIRST)):
                program, *words = shlex.split(line, comments=True)
                assert program in ("olive-ext", "python")
                assert not set("|<>&;$*") & set("".join(words))
                run(*(("-c", OURS) if program == "olive-ext" else ()), *words)
    assert (clone / left).is_file()


VERDICTS = {1: "loss found|far apart|different", 3: "not decided|cannot tell"}
"""What a command prints that ends with the status of a verdict."""
