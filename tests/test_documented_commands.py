"""Every command in the documentation: it is run by a test, here or where `ELSEWHERE` says, or its block is marked.

A block's mark stands behind its language: ```sh gpu, ```sh network, ```sh hours. Quick: each command's arguments are
understood and its files are there. Long: the commands are run, in their order, in a copy of what git has.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from olive_ext.cli.commands import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "recipes").rglob("*.md"))
PROGRAMS = ("olive-ext", "olive", "python", "python3", "pip", "bash", "az")
MARKS = ("gpu", "network", "hours")
RUN_HERE = {"README.md", "recipes/azureml/README.md"}
"""Pages whose blocks are run below, as they stand."""

ELSEWHERE = {
    "python3 -m venv": ".ci/run",  # the README's two commands, word for word
    "pip install": ".ci/run",
    "bash .ci/run": ".ci/run",
    "olive run --config recipes/quickstart/recipe.json": ".ci/run",
    "olive run --config recipes/chains/kquant_int4_b32.json": "tests/recipes/test_chains.py",
    "olive run --config recipes/search/recipe.json": "tests/recipes/test_search.py",
    "olive-ext run --config recipes/vision/": "tests/recipes/test_vision.py",
    "olive-ext run --config recipes/speech/": "tests/recipes/test_speech.py",
    "python recipes/quickstart/make/make_data.py": "tests/recipes/test_quickstart.py",
    "olive-ext evalution": "tests/backends/evalution/test_spec_runner.py",
    "olive-ext compare out/float out/int8 out/int4": "README.md",
}
"""What a command begins with, and what runs it."""


def commands() -> Iterator[tuple[str, str, str]]:
    """Page, mark and command of each line in a block of shell; of other blocks only lines that begin with a program."""
    for page in PAGES:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
        for language, mark, block in re.findall(r"^```(\w*) ?(\w*)\n(.*?)^```", text, re.S | re.M):
            for line in block.splitlines():
                line = line.removeprefix("$ ").strip()
                is_shell = language in ("sh", "bash", "console")
                if line.split(" ")[0] in PROGRAMS and (is_shell or not language):
                    yield name, mark, re.split(r"\s+#\s", line)[0].strip()


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
    where = next((test for start, test in ELSEWHERE.items() if command.startswith(start)), None)
    assert where is not None, f"{page} has a command that no test runs: {command}"
    assert (ROOT / where).is_file()


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


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_pages_run_as_they_stand(tmp_path: Path) -> None:
    """The README's second part needs its first command's model, which is made first."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=tmp_path, input=archive, check=True)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": str(tmp_path)}
    lines = ["olive run --config recipes/quickstart/recipe.json"]
    lines += [line for page, mark, line in COMMANDS if page in RUN_HERE and not mark and _is_run(line)]
    for line in lines:
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    assert (tmp_path / "out" / "compared" / "compare.html").is_file()


def _is_run(line: str) -> bool:
    return not line.startswith(("python3 -m venv", "az"))
