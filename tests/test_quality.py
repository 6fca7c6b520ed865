"""The checks of style, types and generated documents, so that one command runs everything.

Where a tool is not installed its test is skipped; with CI set that is a failure.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import those_of_the_day

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "olive_ext"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["-m", "ruff", "check", "."], id="ruff_check"),
        pytest.param(["-m", "ruff", "format", "--check", "."], id="ruff_format"),
        pytest.param(["-m", "mypy"], id="mypy_strict", marks=pytest.mark.long),
    ],
)
def test_check_passes(arguments: list[str]) -> None:
    if arguments[0] == "-m" and importlib.util.find_spec(arguments[1]) is None:
        reason = f"{arguments[1]} is not installed"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_documents_are_those_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported what a process of its own would import for seconds."""
    from docs import generate

    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_each_test_has_one_day_in_seven(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    drawn = Counter(item for day in range(7) for item in those_of_the_day(items, day))
    assert drawn == Counter(items)


def test_modules_stay_within_600_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.relative_to(ROOT): length for path, length in lengths.items() if length > 600} == {}


def test_functions_stay_within_80_lines() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        long = [node for node in functions if (node.end_lineno or 0) - node.lineno >= 80]
        found += [f"{path.relative_to(ROOT)}:{node.lineno} {node.name}" for node in long]
    assert found == []


def test_every_test_states_what_holds() -> None:
    """In itself or in a function of the tests that it calls: an assertion, or an error that is expected."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls, stating = [(one.name, _calls(one)) for one in functions], {"assert", "raises", "warns", "fail"}
    while more := {name for name, called in calls if name not in stating and called & stating}:
        stating |= more
    silent = [one.name for one in functions if one.name.startswith("test_") and one.name not in stating]
    assert silent == []


def _calls(function: ast.FunctionDef) -> set[str]:
    """The names that it calls; "assert" where it asserts, or calls numpy's `assert_equal` and the like."""
    nodes = list(ast.walk(function))
    called = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in nodes if isinstance(node, ast.Call)}
    is_asserting = any(isinstance(node, ast.Assert) for node in nodes)
    return called | ({"assert"} if is_asserting or any(name.startswith("assert_") for name in called) else set())
