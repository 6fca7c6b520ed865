"""The Python of tasks. Tasks that run code that the model writes: the switch without which they are refused, and the
metric that they get. Then calls that need the network while documents are asked or scored: found in the source of a
loaded task, before a model is opened. Knows no sandbox and no model."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from olive_ext.errors import TaskError
from olive_ext.registry import hook
from olive_ext.session.bounded_templates import replaced

logger = logging.getLogger(__name__)

SWITCH = "confirm_run_unsafe_code"

_PACKAGE = Path(__file__).resolve().parents[1]

CODE = "code"
"""Key of the results that says how code that the model has written was confined, where any was run."""


def _code_eval() -> Any:
    """The metric, of the plug-in "code". Raises `ConfigError` without it."""
    return hook("code_eval", f"'{SWITCH}' = true")


@contextmanager
def loading_metrics(is_confirmed: bool) -> Iterator[None]:
    """What loads a metric of evaluate meanwhile gets none of the working directory's, which evaluate looks for first;
    and with the switch for "code_eval" it gets the sandboxed one, without a download."""
    if not is_confirmed and not _has_scripts(Path.cwd()):
        yield  # importing evaluate takes seconds
        return
    evaluate: Any = importlib.import_module("evaluate")
    own = evaluate.load

    @wraps(own)
    def load(path: str, *args: Any, **options: Any) -> Any:
        if path == "code_eval" and is_confirmed:
            return _code_eval()
        script = Path(path) / f"{Path(path).name}.py"
        if not path.startswith((".", "/")) and script.is_file():
            where = f"'{script}' of the working directory would be run for it: rename that, or work elsewhere"
            raise TaskError(f"a task asks for the metric '{path}' of evaluate, and {where}", code="unknown_name")
        return own(path, *args, **options)

    with replaced(evaluate, "load", load):
        yield


def _has_scripts(folder: Path) -> bool:
    """Whether a folder in it, or one in that, holds Python of its own name: "name", or "owner/name". This package's own
    Python is no stranger's."""
    folders = [item for pattern in ("*/", "*/*/") for item in folder.glob(pattern) if _PACKAGE not in item.parents]
    return any((item / f"{item.name}.py").is_file() for item in folders)


def refuse_unconfirmed(config: Mapping[str, Any], name: str, is_confirmed: bool) -> None:
    """Raises `TaskError` for a task that runs what a model has written, unless that is confirmed."""
    if config.get("unsafe_code") and not is_confirmed:
        raise TaskError(f"task '{name}' runs code that the model writes: '{SWITCH}' = true allows it, in a sandbox")


def refuse_unconfined(tasks: Mapping[str, Any], is_confirmed: bool) -> None:
    """Raises `TaskError` for a loaded task that runs code without the switch, or by other means than that metric."""
    for name, task in _running(tasks).items():
        refuse_unconfirmed({"unsafe_code": True}, name, is_confirmed)
        made = [*getattr(task, "_metric_fn_list", {}).values(), getattr(task.config, "process_results", None)]
        functions = [getattr(item, "__self__", item) for item in made]  # lm-eval keeps a function's `__call__`
        metric = _code_eval()
        if not any(value is metric for one in functions for value in getattr(one, "__globals__", {}).values()):
            own = "by Python of its own, not by 'code_eval': there is no sandbox for it"
            raise TaskError(f"task '{name}' runs code that the model writes {own}", code="untrusted")


def _running(tasks: Mapping[str, Any]) -> dict[str, Any]:
    return {name: task for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)}


def pass_names(task: Any) -> list[str]:
    """The metrics that a task's functions make of the `k` that they are given: lm-eval knows the functions' names."""
    given = getattr(task, "_metric_fn_kwargs", {}).values() if getattr(task, "UNSAFE_CODE", False) else ()
    counts = [options.get("k", ()) for options in given]
    return [f"pass@{k}" for several in counts for k in (several if isinstance(several, list) else [several])]


@contextmanager
def programs_at_once(tasks: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """While an evaluation runs, the programs of all documents of a task run at once, before lm-eval scores them one by
    one. Gives what a report is to say: how code was confined, where any task runs it."""
    running = _running(tasks)
    if not running:
        yield {}
        return
    metric = _code_eval()
    description = metric.sandbox.description
    logger.log(
        logging.INFO if metric.sandbox.mode == "namespaces" else logging.WARNING,
        "%s: generated code is confined by %s", ", ".join(running), description,
    )  # fmt: skip
    with ExitStack() as undo:
        undo.callback(metric.forget)
        for task in running.values():
            undo.enter_context(replaced(task, "apply_filters", _scored_at_once(task)))
        yield {"generated_code": description}


def _scored_at_once(task: Any) -> Callable[..., Any]:
    """The task's `apply_filters`, which then runs the programs of all its documents."""
    own = task.apply_filters

    def apply_filters(*args: Any, **options: Any) -> Any:
        filtered = own(*args, **options)
        documents: dict[int, list[Any]] = defaultdict(list)
        for instance in sorted(task.instances, key=lambda item: item.idx):
            documents[instance.doc_id].append(instance)
        with _code_eval().at_once():
            for requests in documents.values():
                for key in requests[0].filtered_resps:
                    with suppress(Exception):  # raised where lm-eval scores the document
                        task.process_results(requests[0].doc, [item.filtered_resps[key] for item in requests])
        return filtered

    return apply_filters


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
