"""Names of tasks, told by the bytes of their files: lm-eval, which knows them, takes seconds to import and half a
minute to read them. Apart from the loading of tasks, so that a misspelt name is told at once. Imports no lm-eval."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from olive_ext.config.yaml_files import LARGEST_FILE
from olive_ext.errors import TaskError

Spec = str | Mapping[str, Any]

_DEFINED = re.compile(rb"^(?:task|group|tag):[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)
_INCLUDED = re.compile(rb"^(?:include:|[ \t]*-)[ \t]*[\"']?([^\s\"'#]+\.ya?ml)", re.MULTILINE)


def is_file(spec: str) -> bool:
    """Whether a task is named by the path of its file."""
    return spec.endswith((".yaml", ".yml")) or "/" in spec or "\\" in spec


def refuse_unknown(specs: Sequence[Spec], folders: Sequence[str]) -> None:
    """Raises `TaskError` for names that occur in no task file of lm-eval's or of `folders`. Others may be unknown, too:
    a name may stand in a file and name no task."""
    names = [spec for spec in specs if isinstance(spec, str) and not is_file(spec)]
    missing, known = {name for name in names if name.isascii() and name not in shipped_files()}, set[str]()
    for path in _files(folders) if missing else ():
        content = path.read_bytes()
        missing -= {name for name in missing if name.encode() in content or name == path.stem}
        if not missing:
            return
        known.update(found.decode() for found in _DEFINED.findall(content))
    if missing:
        raise TaskError(unknown([name for name in names if name in missing], known))


def unknown(names: Sequence[str], known: Collection[str]) -> str:
    """The message about names that are not among those `known`, with the nearest of these."""
    parts = []
    for name in dict.fromkeys(names):
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(repr(item) for item in near)}?" if near else "no task has a similar name"
        parts.append(f"unknown task '{name}': {hint}")
    return "; ".join(parts)


@lru_cache(maxsize=1)
def shipped_files() -> Mapping[str, tuple[Path, ...]]:
    """lm-eval's own task files by their names without suffix."""
    spec = importlib.util.find_spec("lm_eval")
    files: dict[str, tuple[Path, ...]] = {}
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in Path(place, "tasks").rglob("*.yaml"):
            files[path.stem] = (*files.get(path.stem, ()), path)
    return files


def _files(folders: Sequence[str]) -> Iterator[Path]:
    """Every task file in `folders` that is not too large, what these include from elsewhere, and all of lm-eval's."""
    waiting = [path for folder in folders for path in Path(folder).rglob("*.y*ml")]
    seen: set[Path] = set()
    while waiting:
        path = Path(os.path.realpath(waiting.pop()))  # `resolve` raises where links are a ring
        if path not in seen and path.is_file() and path.stat().st_size <= LARGEST_FILE:
            seen.add(path)
            yield path
            waiting += [path.parent / name.decode(errors="replace") for name in _INCLUDED.findall(path.read_bytes())]
    for paths in shipped_files().values():
        yield from paths
