"""Commands in a process that has imported nothing heavy yet."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olive_ext.cli.commands import IN_CLONE

SCRIPT = """
import json, os, sys
from olive_ext.cli.exit_status import command
from olive_ext.errors import OliveExtError
for folder, *argv in json.loads(sys.argv[1]):
    os.chdir(folder)
    try:
        error = OliveExtError(f"status {command(argv, None)}")
    except OliveExtError as raised:
        error = raised
    heavy = {"olive", "lm_eval", "torch", "transformers", "onnxruntime", "evalution"} & set(sys.modules)
    print(json.dumps([error.code, error.field, str(error.value), str(error), sorted(heavy)]))
"""
STANDS_FOR = {
    "TASKS": f"--tasks quickstart_choice --include-path {IN_CLONE / 'tasks'}",
    "MODEL": str(IN_CLONE / "model"),
}


@dataclass(frozen=True)
class Told:
    """An error as it left the process, and which of the heavy packages were imported."""

    code: str
    field: str
    value: str
    text: str
    imported: list[str]

    def __str__(self) -> str:
        return self.text


def told(folder: Path, given: Sequence[Any], **environment: str) -> list[Told]:
    """What each of these command lines is told, in a folder with the quickstart's recipe; a line may have changes of
    the recipe's evaluator or top keys with it."""
    argv = []
    for number, one in enumerate(given):
        line, changes = (one, {}) if isinstance(one, str) else one
        for name, words in STANDS_FOR.items():
            line = line.replace(name, words)
        argv.append([str(put_recipe(folder / str(number), changes)), *line.split()])
    paths = {"PYTHONPATH": str(IN_CLONE.parents[1]), "PATH": "", **environment}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(argv)], capture_output=True, text=True, env=paths)
    return [Told(*json.loads(line)) for line in done.stdout.splitlines()]


def put_recipe(folder: Path, changes: dict[str, Any]) -> Path:
    made = json.loads((IN_CLONE / "recipe.json").read_text(encoding="utf-8"))
    for key, value in changes.items():
        (made if key in made else made["evaluators"]["quickstart"])[key] = value
    (folder / "gone").mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(made), encoding="utf-8")
    (folder / "recipes").symlink_to(IN_CLONE.parent, target_is_directory=True)
    return folder
