"""Tasks that run code that the model writes: the switch without which they are refused, and the metric that they get.
Knows no sandbox and no model."""

from __future__ import annotations

import importlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from olive_ext.backends.lm_eval_patches import replaced
from olive_ext.errors import TaskError
from olive_ext.registry import hook

logger = logging.getLogger(__name__)

SWITCH = "confirm_run_unsafe_code"

_PACKAGE = Path(__file__).resolve().parents[1]

CODE = "code"
"""Key of the results that says how the model's code was confined, where any was run."""


def _code_eval() -> Any:
    """The metric, of the plug-in "code". Raises `ConfigError` without it."""
    return hook("code_eval", f"'{SWITCH}' = true")


@contextmanager
def loading_metrics(is_confirmed: bool) -> Iterator[None]:
    """Within it, metrics that evaluate loads do not come from the working directory, where it looks first. With the
    switch, "code_eval" is the sandboxed one, which needs no download."""
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
    """Whether a folder in it, or one in that, holds Python of its own name ("name", "owner/name") that is not ours."""
    folders = [item for pattern in ("*/", "*/*/") for item in folder.glob(pattern) if _PACKAGE not in item.parents]
    return any((item / f"{item.name}.py").is_file() for item in folders)


def refuse_unconfirmed(config: Mapping[str, Any], name: str, is_confirmed: bool) -> None:
    """Raises `TaskError` for a task that runs what a model has written, unless the user has confirmed that."""
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
    """The metrics that a task's functions compute of the `k` given to them; lm-eval knows the functions by name."""
    arguments = getattr(task, "_metric_fn_kwargs", {}).values() if getattr(task, "UNSAFE_CODE", False) else ()
    counts = [options.get("k", ()) for options in arguments]
    return [f"pass@{k}" for several in counts for k in (several if isinstance(several, list) else [several])]


@contextmanager
def programs_at_once(tasks: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """Within it, the programs of all documents of a task run at once, before lm-eval scores them one by one. Yields
    what a report must say: how code was confined, if a task runs any."""
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
    """The task's `apply_filters`, which also runs the programs of all its documents."""
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
