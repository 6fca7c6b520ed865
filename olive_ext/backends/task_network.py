"""Calls in the Python of loaded tasks that need the network while documents are asked or scored: found in its source,
before a model is opened. What a file calls as it is imported has been called by then. Knows no model."""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_CALLS: Mapping[str, tuple[str, ...]] = {
    "evaluate": ("load",),
    "datasets": ("load_dataset",),
    "nltk": ("download",),
    "urllib.request": ("urlopen", "urlretrieve"),
    **dict.fromkeys(("requests", "httpx", "openai", "anthropic", "huggingface_hub", "wget"), ()),
}
"""Modules, and which of their functions need the network; where none is named, all do."""

_OF_FILES = ("json", "csv", "text", "parquet", "arrow", "xml", "imagefolder", "audiofolder")
"""What `datasets.load_dataset` calls files that it is given, which are local where no address is written."""


def warn_of_network(tasks: Mapping[str, Any]) -> None:
    """Warns, file by file, of the calls in functions of the tasks' Python that need the network."""
    owners: dict[str, list[str]] = {}
    for name, task in tasks.items():
        for file in _files(task):
            owners.setdefault(file, []).append(name)
    for file, names in owners.items():
        if calls := network_calls(Path(file)):
            listing = ", ".join(f"{call} (line {line})" for line, call in calls)
            logger.warning("%s: functions of '%s' need the network: %s", ", ".join(names), file, listing)


def _files(task: Any) -> list[str]:
    """The files of Python that the functions lie in which a task names."""
    config = getattr(task, "config", None)
    made = [*(() if config is None else vars(config).values()), *getattr(task, "_metric_fn_list", {}).values()]
    files = set()
    for item in made:
        function = inspect.unwrap(getattr(item, "__self__", item)) if callable(item) else None
        if inspect.isfunction(function) and not function.__module__.startswith("lm_eval.api."):
            files.add(function.__code__.co_filename)
    return sorted(files)


def network_calls(path: Path) -> list[tuple[int, str]]:
    """Line and name of each call inside a function of a file; none where it cannot be read."""
    calls: list[tuple[int, str]] = []
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(path.read_bytes())
        names = dict(_imported(tree))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        made = {call for function in functions for call in ast.walk(function) if isinstance(call, ast.Call)}
        calls = [(call.lineno, name) for call in made if (name := _name(call.func, names)) and _is_door(name, call)]
    return sorted(calls)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that imports anywhere in a file bind, and what each stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _name(function: ast.expr, names: Mapping[str, str]) -> str | None:
    """What a call calls, in full, where that is a name of an import."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    if not isinstance(function, ast.Name) or function.id not in names:
        return None
    return ".".join([names[function.id], *parts])


def _is_door(name: str, call: ast.Call) -> bool:
    what = next((given.value for given in call.args if isinstance(given, ast.Constant)), None)
    if what == "code_eval":
        return False  # ours, without a download
    texts = [one.value for one in ast.walk(call) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if what in _OF_FILES and not any("://" in text for text in texts):
        return False
    owner = next((module for module in _CALLS if name.startswith(f"{module}.")), None)
    if owner is None:
        return False
    return not _CALLS[owner] or name.removeprefix(f"{owner}.") in _CALLS[owner]
