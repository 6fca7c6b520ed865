"""Names of tasks and groups, and the folders of their files: what is refused of them before lm-eval, which takes
seconds to import, half a minute to read its own files, and follows a group's members without end. Imports no lm-eval.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from olive_ext.backends.task_files import asked_files, defined_names, folder_files, read_task
from olive_ext.errors import TaskError, meant

Spec = str | Mapping[str, Any]

_KEY, _VALUE = rb"[\"']?(?:task|group|tag)[\"']?:[ \t]*", rb"[\"']?([\w.+-]+)[\"']?[ \t\r]*,?[ \t\r]*(?:#.*)?$"
_ALONE = re.compile(rb"^[ \t]*(?:-[ \t]+)?(?:%s)?(?:%s|\[(.*)\])" % (_KEY, _VALUE), re.MULTILINE)
_DEFINED = re.compile(rb"^(?:task|group|tag):[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)

MOST_TASKS = 10_000
"""Tasks that a group may stand for, one that is in several of its groups counted each time; lm-eval's largest group has
some hundreds, and lm-eval makes each of them as it loads a group."""

DEEPEST = 32
"""Groups inside of each other; lm-eval's have 4."""


def is_file(spec: str) -> bool:
    """Whether a task is named by the path of its file."""
    return spec.endswith((".yaml", ".yml")) or "/" in spec or "\\" in spec


def task_folders(include_path: str | Sequence[str] | None) -> list[str]:
    """The folders of task files as a list; raises `TaskError` for one that does not exist."""
    folders = [include_path] if isinstance(include_path, str) else list(include_path or ())
    for folder in folders:
        if not Path(folder).is_dir():
            raise TaskError("no such folder", "include_path", folder, code="not_found")
    return folders


def refuse_unknown(specs: Sequence[Spec], folders: Sequence[str]) -> None:
    """Raises `TaskError` for names, of groups' members too, that no task file in `folders` defines and that occur in
    none of lm-eval's. Others may be unknown, too: a name may stand in a file of lm-eval's and name no task."""
    named = [spec for spec in specs if isinstance(spec, str) or "group" in spec]  # another inline task may be a new one
    names, files = asked_files(named, folders)
    stems = {path.stem for folder in folders for path in Path(folder).rglob("*.y*ml")}
    known = stems | defined_names(files)
    asked = sorted(name for name in names if name.isascii() and not is_file(name))
    missing = {name for name in asked if name not in known and name not in shipped_files()}
    if not missing:
        return
    everything = folder_files((), folders)
    known |= defined_names(everything)
    broken = [path.read_bytes() for path, config in everything.items() if not config and path.is_file()]
    missing -= known | {name for name in missing if any(name.encode() in content for content in broken)}
    for content in _shipped_texts() if missing else ():
        missing -= set(_names_in(content)) if any(name.encode() in content for name in missing) else set()
        if not missing:
            return
        known.update(name.decode() for name in _DEFINED.findall(content))
    if missing:
        wrong = [name for name in asked if name in missing]
        raise TaskError(unknown(wrong, known), code="unknown_name").about("tasks", wrong)


def _names_in(content: bytes) -> Iterator[str]:
    """The words of a task file that may name a task, a group or a tag: those that are a line's value or item alone, and
    the items of a list in brackets."""
    for word, items in _ALONE.findall(content):
        yield from (item.strip(b" \t\"'").decode(errors="replace") for item in (word, *items.split(b",")))


def unknown(names: Sequence[str], known: Collection[str]) -> str:
    """The message about names that are not among those `known`, with the nearest of these."""
    hints = {name: meant(name, known, most=3) or "no task has a similar name" for name in names}
    return "; ".join(f"unknown task '{name}': {hint}" for name, hint in hints.items())


@lru_cache(maxsize=1)
def shipped_files() -> Mapping[str, tuple[Path, ...]]:
    """lm-eval's own task files by their names without suffix."""
    files: dict[str, tuple[Path, ...]] = {}
    for path in (path for folder in _shipped_folders() for path in folder.rglob("*.yaml")):
        files[path.stem] = (*files.get(path.stem, ()), path)
    return files


def _shipped_texts() -> Iterator[bytes]:
    """The content of lm-eval's own task files, and of files without a suffix, which these include."""
    files = [path for paths in shipped_files().values() for path in paths]
    for folder in _shipped_folders():
        files += [path for path in folder.rglob("*") if not path.suffix and path.is_file()]
    return (path.read_bytes() for path in files)


def _shipped_folders() -> list[Path]:
    spec = importlib.util.find_spec("lm_eval")
    return [Path(package, "tasks") for package in (spec.submodule_search_locations or ())] if spec is not None else []


def refuse_groups(specs: Sequence[Spec], index: Mapping[str, Any]) -> None:
    """Raises `TaskError` for a group among `specs`, or inside of one, that has no tasks, is a member of itself, or
    breaks a limit. `index` is lm-eval's, by name; members that it lacks count as tasks."""
    known: dict[str, int] = {}
    for spec in specs:
        if isinstance(spec, str) and is_file(spec) and (path := Path(spec).expanduser()).is_file():
            _num_tasks(read_task(path), index, known, ())
        else:
            _num_tasks(spec, index, known, ())


def _num_tasks(member: Any, index: Mapping[str, Any], known: dict[str, int], above: tuple[str, ...]) -> int:
    """The tasks that a member stands for; `known` are those of groups by name, `above` the groups that it is in."""
    config = _config(member, index)
    if config is None:
        return 1
    name, members = str(config.get("group")), config.get("task")
    if name in above:
        raise TaskError(f"group '{name}' is a member of itself: {' > '.join([*above[above.index(name) :], name])}")
    if len(above) >= DEEPEST:
        raise TaskError(f"group '{above[0]}' has more than {DEEPEST} levels of groups (DEEPEST)", code="too_large")
    if name not in known or isinstance(member, Mapping):
        if not isinstance(members, list) or not members:
            raise TaskError(f"group '{name}' has no tasks; give a list of names", "task", members, code="wrong_value")
        known[name] = sum(_num_tasks(item, index, known, (*above, name)) for item in members)
    if known[name] > MOST_TASKS:
        raise TaskError(
            f"group '{name}' has {known[name]:,} tasks: at most {MOST_TASKS:,} (MOST_TASKS)", code="too_large"
        )
    return known[name]


def _config(member: Any, index: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What defines a group: where it is written, or in the index; None for a task and for a tag."""
    name = member.get("group", member.get("task")) if isinstance(member, Mapping) else member
    written = member if isinstance(member, Mapping) and "group" in member and "task" in member else None
    entry = index.get(name) if isinstance(name, str) and written is None else None
    config = written if entry is None else entry.cfg
    return config if isinstance(config, Mapping) and "group" in config and "class" not in config else None
