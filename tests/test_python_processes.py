"""The road to a Python process: the user's path, and nothing of the working directory; and that there is no other."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from olive_ext import python_processes
from tests.strangers import environment, put_modules

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(python_processes.__file__)
PARENT = f"""
import runpy, subprocess, sys
own = runpy.run_path({str(SOURCE)!r})
sys.path[:] += ["", sys.argv[1]]
for command in (own["python_command"](sys.argv[2], "given"), own["module_command"]("mine", "given")):
    subprocess.run(command, check=True, cwd=sys.argv[3])
"""
CHILD = """
import json, numpy, pickle, runpy, sys, mine
print(sys.argv[1:], numpy.__name__, mine.__name__)
"""


def interpreters() -> list[str]:
    """This Python, and others that are here: 3.10 has no switch against the working directory."""
    found = (shutil.which(f"python3.{minor}") for minor in (10, 12, 13))
    return [sys.executable, *(path for path in found if path and not subprocess.run([path, "-c", ""]).returncode)]


@pytest.mark.parametrize("python", interpreters())
def test_child_imports_from_the_users_path_and_not_from_the_working_directory(python: str, tmp_path: Path) -> None:
    model, users, ran = tmp_path / "model", tmp_path / "users", tmp_path / "ran"
    for folder in (model, users):
        folder.mkdir()
    put_modules(model)
    (users / "mine.py").write_text("import sys\nif __name__ == '__main__':\n    print('module', sys.argv[1:])\n")
    (users / "numpy.py").write_text("")  # other Pythons here have none
    place = {"PYTHONPATH": str(users)}
    arguments = [str(users), CHILD, str(model)]
    done = subprocess.run(
        [python, "-c", PARENT, *arguments], env=environment(ran, **place), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['given'] numpy mine", "module ['given']"]
    assert not ran.exists()


def test_the_same_without_it_would_run_what_lies_there(tmp_path: Path) -> None:
    put_modules(tmp_path)
    ran = tmp_path / "ran"
    subprocess.run([sys.executable, "-c", "import json, numpy"], env=environment(ran), cwd=tmp_path)
    assert set(ran.read_text().split()) == {"json", "numpy"}


def test_folder_whose_name_is_no_text_stays_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "", tmp_path, f"{tmp_path}/é\udc80'\""])
    program = "print(ascii(sys.path[-1]))"
    done = subprocess.run(python_processes.python_command(program), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ascii(sys.path[-1])


def test_what_a_child_prints_before_it_serves_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's welcome, and a library's while it is imported."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome to this machine', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    program = "print('imported'); from olive_ext.python_processes import serve; serve(lambda given: given + 1)"
    child = python_processes.ChildProcess(program)
    try:
        child.send(1)
        assert next(answer for kind, answer in iter(lambda: child.receive(30), None) if kind == "answer") == 2
    finally:
        child.stop()


def test_no_other_module_starts_python() -> None:
    """A process of Python is named by sys.executable; a fork of multiprocessing's may be a new one."""
    found = []
    for path in sorted((ROOT / "olive_ext").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "executable" not in text and "multiprocessing" not in text:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "executable"]
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        if "sys.executable" in map(ast.unparse, attributes) or "multiprocessing" in modules:
            found.append(path)
    assert found == [SOURCE]
