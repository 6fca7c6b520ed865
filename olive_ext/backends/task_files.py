"""Task files as they are written: read within limits, with what they include and the files of Python and data that they
name. Imports no lm-eval, and nothing that the files name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from olive_ext.config.yaml_files import LOADER, UnboundedError, yaml_bytes
from olive_ext.errors import TaskError, first_line

MOST_INCLUDED = 100
"""Files that a task file includes, those that they include among them; lm-eval's include three."""


class EndlessTaskError(TaskError):
    """A task file that lm-eval would read for ever, or that has it read such a file."""


class _Function(str):
    """The name of a function in a task file."""


class _Reader(LOADER):  # type: ignore[misc]
    """Reads a task file without importing the functions that it names."""


_Reader.add_multi_constructor(
    "!", lambda loader, suffix, node: _Function(node.value) if isinstance(node, yaml.ScalarNode) else None
)


def read_task(path: Path) -> Mapping[str, Any]:
    """A task file's content. Raises `TaskError` with the reason, the file and the line where it cannot be parsed, and
    `EndlessTaskError` where it breaks a limit of `yaml_files`."""
    try:
        config = yaml.load(yaml_bytes(path), Loader=_Reader)
    except UnboundedError as error:
        raise EndlessTaskError(f"task file '{path}' is not read: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise TaskError(f"task file '{path}'{place} cannot be parsed: {error.problem or error.context}") from error
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise TaskError(f"task file '{path}' cannot be parsed: {first_line(error)}") from error
    if not isinstance(config, Mapping):
        raise TaskError(f"task file '{path}' holds no mapping")
    return config


def refuse_broken_files(names: Sequence[str], folders: Sequence[str]) -> None:
    """Raises `TaskError` where the file of a task that is missing is there, and it or what it includes cannot be read:
    lm-eval passes over such files, and calls the task unknown."""
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.y*ml")):
            if path.stem in names:
                _refuse_broken(path, [])


def _refuse_broken(path: Path, read: list[Path]) -> None:
    read.append(Path(os.path.realpath(path)))
    for name in _included(read_task(path)):
        included = path.parent / str(name)
        if not isinstance(name, str) or not included.exists():
            raise TaskError(f"task file '{path}': 'include' = {name!r}: no such file")
        if Path(os.path.realpath(included)) in read:
            raise TaskError(f"task file '{path}': 'include' = {name!r}, which is being read already")
        if len(read) > MOST_INCLUDED:
            raise TaskError(f"task file '{read[0]}' includes more than {MOST_INCLUDED} files (MOST_INCLUDED)")
        _refuse_broken(included, read)


def _included(config: Mapping[str, Any]) -> list[Any]:
    named = config.get("include") or []
    return named if isinstance(named, list) else [named]


def refuse_endless(tasks: Sequence[object], folders: Sequence[str]) -> None:
    """Raises `EndlessTaskError` for a task file, or a file of Python or data that one names, that is no regular file,
    and for a task file that breaks a limit. lm-eval reads all task files of a folder, whichever task is asked for."""
    inline = [(None, task) for task in tasks if isinstance(task, Mapping)]
    for path, config in [*_files(tasks, folders), *inline]:
        local = [] if path is None else [_python_file(path, name) for name in _functions(config)]
        for file in [*local, *data_files(config)]:
            if file.exists() and not (file.is_file() or file.is_dir()):
                told = "an inline task" if path is None else f"task file '{path}'"
                raise EndlessTaskError(f"{told} names '{file}', which is no regular file")


def data_files(config: Mapping[str, Any]) -> list[Path]:
    """The local files that a task's `dataset_kwargs` name as `data_files`: a name, or a list or a mapping of such."""
    settings = config.get("dataset_kwargs")
    waiting = [settings.get("data_files")] if isinstance(settings, Mapping) else []
    found: list[Path] = []
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, str) and "://" not in item:
            found.append(Path(item))
        elif isinstance(item, Mapping | list):
            waiting += item.values() if isinstance(item, Mapping) else item
    return found


def functions_in(tasks: Sequence[object], folders: Sequence[str]) -> dict[Path | str, list[str]]:
    """The functions that task files name (`!function`), by the Python file, or the installed module, that they lie in.

    Looks at the files in `folders`, at those among `tasks`, and at what these include; imports nothing. lm-eval runs
    the functions of the tasks that are chosen. Files that cannot be parsed have none.
    """
    found: dict[Path | str, set[str]] = {}
    for path, config in _files(tasks, folders):
        for name in _functions(config):
            module, _, function = name.rpartition(".")
            file = _python_file(path, name)
            found.setdefault(file.resolve() if file.exists() else module, set()).add(function)
    return {place: sorted(names) for place, names in sorted(found.items(), key=lambda item: str(item[0]))}


def _python_file(path: Path, function: str) -> Path:
    """Where lm-eval looks first for a function that the task file at `path` names."""
    return path.parent / f"{function.rpartition('.')[0].replace('.', '/')}.py"


def _files(tasks: Sequence[object], folders: Sequence[str]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The task files in `folders`, those among `tasks` and what these include, each once; without those that cannot be
    parsed. Raises `EndlessTaskError`."""
    waiting = [path for folder in folders for path in sorted(Path(folder).rglob("*.y*ml"))]
    waiting += [Path(task).expanduser() for task in tasks if isinstance(task, str) and task.endswith((".yaml", ".yml"))]
    seen: set[Path] = set()
    while waiting:
        path = Path(os.path.realpath(waiting.pop()))  # `resolve` raises where links are a ring
        if path in seen:
            continue
        seen.add(path)
        try:
            config = read_task(path)
        except EndlessTaskError:
            raise
        except TaskError:
            continue
        waiting += [path.parent / str(name) for name in _included(config)]
        yield path, config


def _functions(value: object) -> Iterator[str]:
    if isinstance(value, _Function):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _functions(item)
