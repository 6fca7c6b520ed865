"""Task files as they are written, with the files that they include and the files of Python and data that they name.
Also the names of tasks and groups, and the folders of their files. Mistakes are refused before lm-eval, which takes
seconds to import and half a minute to read its own files, and follows a group's members without end. Imports no
lm-eval, and nothing that the files name."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from olive_ext.config.base import TASK_FILES
from olive_ext.config.yaml_files import LOADER, WRONG_TAGS, UnboundedError, doubled_key, yaml_bytes
from olive_ext.errors import TaskError, first_line, special_kind, suggest

_DATA = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")


class _Function(str):
    """The name of a function in a task file."""


class _TaskReader(LOADER):  # type: ignore[misc]
    """Reads a task file without importing the functions that it names."""


_TaskReader.add_multi_constructor(
    "!", lambda loader, suffix, node: _Function(node.value) if isinstance(node, yaml.ScalarNode) else None
)


def read_task(path: Path) -> Mapping[str, Any]:
    """A task file's content. Raises `TaskError` with the reason, the file and the line: "damaged" where it cannot be
    parsed, and of another code where `yaml_files` refuses it."""
    try:
        config = yaml.load(yaml_bytes(path), Loader=_TaskReader)
    except UnboundedError as error:
        raise TaskError(f"task file '{path}' is not read: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise TaskError(f"cannot parse '{path}'{line}: {error.problem or error.context}", code="damaged") from error
    except (OSError, *WRONG_TAGS, yaml.YAMLError, RecursionError) as error:
        raise TaskError(f"task file '{path}' cannot be parsed: {first_line(error)}", code="damaged") from error
    if not isinstance(config, Mapping):
        raise TaskError(f"task file '{path}' holds no mapping", code="damaged")
    return config


def refuse_broken_files(names: Sequence[str], folders: Sequence[str]) -> None:
    """Raises `TaskError` where the file of a missing task exists, and it or what it includes cannot be read: lm-eval
    skips such files, and calls the task unknown."""
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.y*ml")):
            if path.stem in names:
                _refuse_broken(path, [])


def _refuse_broken(path: Path, read: list[Path]) -> None:
    read.append(_real(path))
    for name in _included(read_task(path)):
        included = path.parent / str(name)
        if not isinstance(name, str) or not included.exists():
            raise TaskError(f"task file '{path}': no file 'include' = {name!r}", "include", name, code="not_found")
        if _real(included) in read:
            raise TaskError(f"task file '{path}': 'include' = {name!r} is being read", "include", code="damaged")
        _refuse_broken(included, read)


def _included(config: Mapping[str, Any]) -> list[Any]:
    named = config.get("include") or []
    return named if isinstance(named, list) else [named]


class TaskFiles:
    """The task files in `folders`, those among `tasks`, and what these include. lm-eval's own files are not checked.
    Raises `TaskError` for a file that no reader may end with."""

    def __init__(self, tasks: Sequence[object], folders: Sequence[str]) -> None:
        self._tasks = tasks
        self.contents: dict[Path, Mapping[str, Any]] = {}
        """By path; empty for a file that cannot be parsed."""

        named = [Path(task).expanduser() for task in tasks if isinstance(task, str) and task.endswith(TASK_FILES)]
        waiting = [*named, *(path for folder in folders for path in sorted(Path(folder).rglob("*.y*ml")))]
        while waiting:
            path = _real(waiting.pop())
            if path not in self.contents:
                waiting += _included_files(path, self._read(path))

    def _read(self, path: Path) -> Mapping[str, Any]:
        if path not in self.contents:
            try:
                self.contents[path] = read_task(path)
            except TaskError as error:
                if error.code != "damaged":
                    raise
                self.contents[path] = {}
        return self.contents[path]

    def referenced(self) -> tuple[set[str], dict[Path, Mapping[str, Any]]]:
        """The names that the tasks and the members of their groups have, and the files that define them, with what
        these include."""
        names: set[str] = set()
        files: dict[Path, Mapping[str, Any]] = {}
        waiting: list[object] = list(self._tasks)
        while waiting:
            item = waiting.pop()
            if isinstance(item, str) and item.endswith(TASK_FILES):
                item = Path(item).expanduser()
            if isinstance(item, Mapping):
                waiting += _members(item)
            elif isinstance(item, Path) and (path := _real(item)) not in files:
                files[path] = self._read(path)
                waiting += [*_members(files[path]), *_included_files(path, files[path])]
            elif isinstance(item, str) and item not in names:
                names.add(item)
                waiting += [path for path, config in self.contents.items() if item in _defined(config)]
        return names, files

    def defined_names(self) -> set[str]:
        """The names of tasks, groups and tags that the files define, groups inside of groups too."""
        names: set[str] = set()
        waiting: list[object] = list(self.contents.values())
        while waiting:
            config = waiting.pop()
            if isinstance(config, Mapping):
                names.update(name for name in _defined(config) if isinstance(name, str))
                waiting += config["task"] if isinstance(config.get("task"), list) else []
        return names

    def refuse_doubled_keys(self) -> None:
        """Raises `TaskError` for a task file with a repeated key, of which lm-eval takes the last."""
        for path in self.referenced()[1]:
            if path.is_file() and (twice := doubled_key(path)):
                raise TaskError(f"task file '{path}', {twice}", code="damaged")

    def refuse_endless(self) -> None:
        """Raises `TaskError` for a file of Python or data that a task file names and that is a pipe or a device.
        lm-eval reads all task files of a folder, whichever task is asked for."""
        inline = [(None, task) for task in self._tasks if isinstance(task, Mapping)]
        for path, config in [*self.contents.items(), *inline]:
            named = [] if path is None else [_python_file(path, name) for name in _functions(config)]
            for file in [*named, *(module for one in named for module in helpers_of(one)), *data_files(config)]:
                if kind := special_kind(file):
                    source = "an inline task" if path is None else f"task file '{path}'"
                    raise TaskError(f"{source} names '{file}', which is {kind}")

    def functions(self) -> dict[Path | str, list[str]]:
        """The functions that the files of the tasks name (`!function`), by the Python file, or the installed module,
        that contains them. Imports nothing. Files that cannot be parsed have none."""
        functions: dict[Path | str, set[str]] = {}
        for path, config in self.referenced()[1].items():
            for name in _functions(config):
                module, _, function = name.rpartition(".")
                file = _python_file(path, name)
                functions.setdefault(file.resolve() if file.exists() else module, set()).add(function)
        return {origin: sorted(names) for origin, names in sorted(functions.items(), key=lambda item: str(item[0]))}


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `resolve` raises where links are a ring


def _included_files(path: Path, config: Mapping[str, Any]) -> list[Path]:
    return [path.parent / str(name) for name in _included(config)]


def data_files(config: Mapping[str, Any]) -> list[Path]:
    """The local files that a task's `dataset_kwargs` name as `data_files`: a name, or a list or a mapping of such."""
    settings = config.get("dataset_kwargs")
    waiting = [settings.get("data_files")] if isinstance(settings, Mapping) else []
    files: list[Path] = []
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, str) and "://" not in item:
            files.append(Path(item))
        elif isinstance(item, Mapping | list):
            waiting += item.values() if isinstance(item, Mapping) else item
    return files


def _defined(config: Mapping[str, Any]) -> list[Any]:
    """The names that a task file defines: a task's, a group's, tags."""
    tags = config.get("tag")
    return [config.get("task"), config.get("group"), *(tags if isinstance(tags, list) else [tags])]


def _members(config: Mapping[str, Any]) -> list[object]:
    """What a group names, or the task that a member changes; a member with data of its own defines a new task."""
    members = config.get("task")
    if isinstance(members, str):
        return [] if {"dataset_path", "class"} & set(config) else [members]
    return list(members) if isinstance(members, list) else []


def _python_file(path: Path, function: str) -> Path:
    """Where lm-eval looks first for a function that the task file at `path` names."""
    return path.parent / f"{function.rpartition('.')[0].replace('.', '/')}.py"


def helpers_of(file: Path) -> list[Path]:
    """The Python files below the folder of `file` that it imports, and that these import. Nothing is run."""
    known, waiting = {file}, [file] if file.is_file() else []  # to read a pipe may never end
    while waiting:
        names = set[str]()
        with suppress(OSError, SyntaxError, ValueError, RecursionError):
            for node in ast.walk(ast.parse(waiting.pop().read_bytes())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    base = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                    names |= {*base, *(".".join((*base, one.name)) for one in node.names)}
        places = {file.parent / f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py")}
        new = {place for place in places - known if place.is_file()}
        known, waiting = known | new, [*waiting, *new]
    return sorted(known - {file})


def _functions(value: object) -> Iterator[str]:
    if isinstance(value, _Function):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _functions(item)


Spec = str | Mapping[str, Any]

_WORD = re.compile(rb"[\w.+-]+")
_DEFINED = re.compile(rb"^(?:task|group|tag):[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)


def is_file(spec: str) -> bool:
    """Whether a task is named by the path of its file."""
    return spec.endswith(TASK_FILES) or "/" in spec or "\\" in spec


def task_folders(include_path: str | Sequence[str] | None) -> list[str]:
    """The folders of task files as a list; raises `TaskError` for one that does not exist."""
    folders = [include_path] if isinstance(include_path, str) else list(include_path or ())
    for folder in folders:
        if not Path(folder).is_dir():
            raise TaskError("no such folder", "include_path", folder, code="not_found")
    return folders


def refuse_unknown(specs: Sequence[Spec], folders: Sequence[str]) -> None:
    """Raises `TaskError` for names, of groups' members too, that no file in `folders` defines and that occur in none of
    lm-eval's. Others may be unknown, too: a name may occur in a file without naming a task."""
    named = [spec for spec in specs if isinstance(spec, str) or "group" in spec]  # another inline task may be a new one
    files = TaskFiles(named, folders)
    stems = {path.stem for folder in folders for path in Path(folder).rglob("*.y*ml")}
    known = {*stems, *files.defined_names(), *shipped_files()}
    asked = sorted(name for name in files.referenced()[0] if name.isascii() and not is_file(name))
    missing = {name for name in asked if name not in known}
    broken = [path.read_bytes() for path, config in files.contents.items() if not config and path.is_file()]
    for content in chain(broken, _shipped_texts()) if missing else ():
        missing -= {name for name in missing if name.encode() in content and name.encode() in _WORD.findall(content)}
        if not missing:
            return
        known.update(name.decode() for name in _DEFINED.findall(content))
    if missing:
        tasks = known - (stems - {*files.defined_names()})
        raise unknown([name for name in asked if name in missing], tasks, folders)


def unknown(names: Sequence[str], known: Collection[str], folders: Sequence[str]) -> TaskError:
    """The error for names that are not `known`, with the nearest of these; without `folders`, also with the key."""
    hints = {name: suggest(name, known, most=3) or "no task has a similar name" for name in names}
    hints |= {
        name: "a task is a YAML file that names its data (docs/start/shell.md)"
        for name in names
        if name.lower().endswith(_DATA)
    }
    own = "" if folders else "; task files of your own are in the folders that 'include_path' names"
    message = "; ".join(f"unknown task '{name}': {hint}" for name, hint in hints.items())
    return TaskError(message + own, code="unknown_name").about("tasks", names)


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


def tasks_of(spec: Spec, index: Mapping[str, Any]) -> list[Any]:
    """A task, or each member of a group that is no group, as written; names that lm-eval's `index` lacks are tasks.
    Raises `TaskError` for a group, or one inside it, that has no tasks or is a member of itself."""
    if isinstance(spec, str) and is_file(spec) and (path := Path(spec).expanduser()).is_file():
        content = read_task(path)
        spec = content if "group" in content else spec
    return list(_tasks(spec, index, ()))


def _tasks(member: Any, index: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Any]:
    """`above` are the groups that the member is in."""
    config = _config(member, index)
    if config is None:
        yield member
        return
    name, members = str(config.get("group")), config.get("task")
    if name in above:
        raise TaskError(f"group '{name}' is a member of itself: {' > '.join([*above[above.index(name) :], name])}")
    if not isinstance(members, list) or not members:
        raise TaskError(f"group '{name}' has no tasks; give a list of names", "task", members, code="wrong_value")
    for item in members:
        yield from _tasks(item, index, (*above, name))


def _config(member: Any, index: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The definition of a group, as written or in the index; None for a task and for a tag."""
    name = member.get("group", member.get("task")) if isinstance(member, Mapping) else member
    written = member if isinstance(member, Mapping) and "group" in member and "task" in member else None
    entry = index.get(name) if isinstance(name, str) and written is None else None
    config = written if entry is None else entry.cfg
    return config if isinstance(config, Mapping) and "group" in config and "class" not in config else None
