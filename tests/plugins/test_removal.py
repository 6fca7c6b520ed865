"""Each plug-in is removed in turn: its commands, functions and passes are gone, and all else works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import olive_ext
from olive_ext.registry import load, plugins
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export

PACKAGE = Path(olive_ext.__file__).parent
NAMES = sorted(path.parent.name for path in (PACKAGE / "plugins").glob("*/__init__.py"))

PROGRAM = """
import contextlib, io, json, sys
import olive_ext
from olive_ext.cli import main
from olive_ext.cli.parser import commands
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


@pytest.mark.long
@pytest.mark.parametrize("names", [*([name] for name in NAMES), NAMES], ids="-".join)
def test_rest_works_without(names: list[str], tmp_path: Path) -> None:
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
    command = [sys.executable, "-c", PROGRAM, str(genai_export("llama")), str(tmp_path / "tasks"), json.dumps(gone)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr[-3000:]
