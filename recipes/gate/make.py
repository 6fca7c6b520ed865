"""Makes the toy repository: a model, a recipe that exports it, a gate, and three pull requests as branches.

python recipes/gate/make.py DIR
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"


def _int4(block_size: int) -> dict[str, Any]:
    """Olive's passes; level 1 multiplies in fp32, so that another processor gives the same answers."""
    level = {"int4_accuracy_level": 1, "int4_algo_config": "rtn"}
    return {"passes": {"build": {"type": "ModelBuilder", "precision": "int4", "int4_block_size": block_size, **level}}}


PULL_REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "passes": ("int4 in blocks of 64", "quantize.json", _int4(64)),
    "cannot-tell": ("int4 in blocks of 128", "quantize.json", _int4(128)),
    "fails": (
        "A rotary base for longer texts",
        "model/config.json",
        {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}},
    ),
}
"""By branch: the commit's subject, the file that it changes, and the keys that it sets there."""


def make(folder: Path) -> None:
    """Fills `folder`, which must be new; leaves main checked out."""
    shutil.copytree(HERE / "repository", folder)
    for part in ("model", "tasks"):
        shutil.copytree(QUICKSTART / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    _git(folder, "init", "--quiet", "--initial-branch", "main")
    _commit(folder, "A model and its gate")
    for branch, (subject, name, keys) in PULL_REQUESTS.items():
        _git(folder, "checkout", "--quiet", "-b", branch, "main")
        file = folder / name
        values = json.loads(file.read_text(encoding="utf-8"))
        indent = 2 if name.startswith("model/") else 4
        file.write_text(json.dumps({**values, **keys}, indent=indent) + "\n", encoding="utf-8")
        _commit(folder, subject)
    _git(folder, "checkout", "--quiet", "main")


def _commit(folder: Path, subject: str) -> None:
    _git(folder, "add", "--all")
    author = ("-c", "user.name=toy", "-c", "user.email=toy@example.org", "-c", "commit.gpgsign=false")
    _git(folder, *author, "commit", "--quiet", "--message", subject)


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
