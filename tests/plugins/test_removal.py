"""Each plug-in is removed in turn: its commands, functions and passes are gone, and all else works."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.registry import load, plugins
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export

PACKAGE = Path(olive_ext.__file__).parent
NAMES = sorted(path.parent.name for path in (PACKAGE / "plugins").glob("*/__init__.py"))

PROGRAM = """
import contextlib, io, json, sys
assert "olive_ext" not in sys.modules
sys.path.insert(0, sys.argv[4])
import olive_ext
assert olive_ext.__file__.startswith(sys.argv[4])
from olive_ext.cli import main
from olive_ext.cli.options import commands
from olive_ext.config import evaluator_settings, pass_settings
model, tasks, gone = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
assert not {*gone["commands"]} & commands().keys(), "commands"
assert not {*gone["passes"]} & pass_settings().keys(), "passes"
assert not {*gone["evaluators"]} & evaluator_settings().keys(), "evaluators"
assert not any(hasattr(olive_ext, name) for name in gone["functions"]), "functions"
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["--help"]) == main(["schema", "recipe"]) == main(["check", model, "--max-length", "64"]) == 0
    assert all(main([name]) == 2 for name in gone["commands"])
asked = {"tasks": ["tiny_choice"], "include_path": tasks, "max_length": 64, "reference": model}
report = olive_ext.evaluate(model, **asked, progress=False)
assert report.metrics and report.comparison.overall_divergence().kl.mean < 1e-6
import olive_ext.workflow
print("done")
"""


def test_every_name_in_a_hook_is_there() -> None:
    assert {*NAMES} <= plugins().keys()
    for plugin in plugins().values():
        names = [*plugin.functions.values(), *plugin.hooks.values()]
        for command in plugin.commands.values():
            names += [command.function, *([command.options] if command.options else [])]
        for one in plugin.passes.values():
            names += [one.kind, one.settings]
        for evaluator in plugin.evaluators.values():
            names += [evaluator.settings, evaluator.mistakes, evaluator.describe]
        assert all(load(name) is not None for name in names)


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported, for seconds, what the package does, but not the package."""
    imported = ("torch", "transformers", "lm_eval.tasks", "onnxruntime", "olive.workflows")
    command = [sys.executable, "-m", "tests.export_maker", *imported]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=PACKAGE.parent, text=True, **pipes) as process:
        yield process
        process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("names", [*([name] for name in NAMES), NAMES], ids="-".join)
def test_rest_works_without(names: list[str], tmp_path: Path, forks: subprocess.Popen[str]) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "olive_ext", ignore=ignored)
    for name in names:
        shutil.rmtree(tmp_path / "olive_ext" / "plugins" / name)
    write_tasks(tmp_path / "tasks")
    removed = [plugins()[name] for name in names]
    gone = {
        kind: [name for plugin in removed for name in getattr(plugin, kind)]
        for kind in ("commands", "passes", "evaluators", "functions")
    }
    arguments = ["-c", PROGRAM, str(genai_export("llama")), str(tmp_path / "tasks"), json.dumps(gone), str(tmp_path)]
    log, errors = tmp_path / "log", tmp_path / "errors"
    places = {"log": str(log), "errors": str(errors), "folder": str(tmp_path), "environment": {"HF_HUB_OFFLINE": "1"}}
    assert forks.stdin is not None
    print(json.dumps({"arguments": arguments, **places}), file=forks.stdin, flush=True)
    assert forks.stdout.readline() == "0\n", errors.read_text()[-3000:]
    assert log.read_text().splitlines()[-1:] == ["done"]
