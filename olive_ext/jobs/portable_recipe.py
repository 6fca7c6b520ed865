"""A recipe whose paths no longer lie on this machine: what it reads becomes inputs, what it writes goes below `out`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olive_ext.check import blocks

OUT = "out"
NODE = "olive_ext_node"
"""What Ray counts one of on each node of a job: a worker takes it, so that each node has one, whenever it joins."""

_WRITTEN = {"output_dir": OUT, "cache_dir": f"{OUT}/cache"}
_OURS = {"output_dir": "reports", "sample_log_dir": "samples", "records_dir": "records", "use_cache": "answers"}
"""Folders of our evaluators and passes, below `out`."""

_SCRIPTS = ("user_script", "model_script")
_PATHS = ("model_path", "include_path", "reference", "path", "tokenizer", "data_files", "script_dir")
"""Keys whose value may be a path without a slash; any other such word is left alone."""

_WITH_NEIGHBOURS = (".onnx", ".yaml", ".yml")
"""Files that name others in their folder: external data, a task's documents. Their folder is the input."""


@dataclass
class PortableRecipe:
    """The recipe as it is run in a job's working directory, with the files that have to be there."""

    recipe: dict[str, Any]
    inputs: dict[str, Path] = field(default_factory=dict)
    """Name to file or folder on this machine; in the job it is `inputs/<name>`."""

    scripts: dict[str, Path] = field(default_factory=dict)
    """Name in the job's working directory to the script on this machine."""

    def input_path(self, path: Path) -> str:
        """The path at which the job finds `path`, which becomes an input, or lies in one."""
        whole = path.parent if path.suffix.lower() in _WITH_NEIGHBOURS else path
        name = _named(self.inputs, whole, re.sub(r"\W+", "_", whole.stem).strip("_").lower() or "input")
        return f"inputs/{name}" if whole == path else f"inputs/{name}/{path.name}"

    def script_path(self, path: Path) -> str:
        """The path at which the job finds a script: its own name; where another folder's has that, one with a
        number."""
        return _named(self.scripts, path, path.stem, path.suffix)


def _named(known: dict[str, Path], path: Path, stem: str, suffix: str = "") -> str:
    """The name of `path` among those that are `known`, or a new one, which nothing else there has."""
    name = next((name for name, other in known.items() if other == path), None)
    if name is None:
        names = (f"{stem}{more}{suffix}" for more in ("", *(f"_{number}" for number in range(2, len(known) + 2))))
        name = next(name for name in names if name not in known)
        known[name] = path
    return name


def portable(recipe: Mapping[str, Any], num_nodes: int = 1) -> PortableRecipe:
    """The recipe with paths of inputs and outputs; `num_nodes` above 1 gives our evaluators a worker on each."""
    moved = PortableRecipe({})
    moved.recipe.update(_moved(moved, "", dict(recipe)))
    engine = moved.recipe.get("engine", {})
    (engine if "output_dir" in engine else moved.recipe).update(_WRITTEN)
    for block in blocks(moved.recipe):
        if block.is_ours:
            keys: Any = block.keys.get("config" if block.is_pass else "type_args") or block.keys
            keys.update({name: f"{OUT}/{folder}" for name, folder in _OURS.items() if name in keys})
            keys.setdefault("output_dir", f"{OUT}/reports")  # the journal lies there, from which a killed job resumes
            if num_nodes > 1:
                keys["workers"] = {"count": num_nodes, "address": "auto", "resources": {NODE: 1}}
    return moved


def _moved(moved: PortableRecipe, key: str, value: Any) -> Any:
    """`value` at `key` with every path that leads somewhere moved."""
    if isinstance(value, Mapping):
        return {name: _moved(moved, str(name), item) for name, item in value.items()}
    if isinstance(value, list):
        return [_moved(moved, key, item) for item in value]
    if not isinstance(value, str) or key in _WRITTEN or not (key in (*_PATHS, *_SCRIPTS) or re.search(r"[/\\]", value)):
        return value
    path = Path(value).expanduser()
    if not value or not path.exists():
        return value
    return (moved.script_path if key in _SCRIPTS else moved.input_path)(path.resolve())
