"""Patches that take avoidable cost and noise out of lm-eval while an evaluation runs, undone afterwards.

Only attributes that exist and are of the expected kind are replaced; another version of lm-eval stays as it is.
Knows no task and no model.
"""

from __future__ import annotations

import functools
import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jinja2
import lm_eval.loggers.utils
import lm_eval.utils

from olive_ext.backends.progress import shown
from olive_ext.text.bounded_templates import BoundedEnvironment

_BARS = (
    "tqdm",
    "lm_eval.api.model",
    "lm_eval.api.task",
    "lm_eval.models.huggingface",
)


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Templates of task files are rendered in jinja's sandbox, where they reach no attribute that leads to the
    interpreter, and within limits: lm-eval renders them as code of its own."""
    own: Any = getattr(lm_eval.utils, "env", None)
    if type(own) is not jinja2.Environment:
        yield
        return
    sandbox = BoundedEnvironment(loader=own.loader, undefined=own.undefined, keep_trailing_newline=True)
    sandbox.filters.update(own.filters)
    lm_eval.utils.env = sandbox
    try:
        yield
    finally:
        lm_eval.utils.env = own


@contextmanager
def compiled_templates() -> Iterator[None]:
    """Task templates run in jinja's sandbox and are compiled once: lm-eval compiles anew for every render (6.3 ms
    against 0.05 ms)."""
    with sandboxed_templates():
        environment: Any = getattr(lm_eval.utils, "env", None)
        if not isinstance(environment, jinja2.Environment) or "from_string" in vars(environment):
            yield
            return
        environment.from_string = functools.lru_cache(maxsize=4096)(environment.from_string)  # type: ignore[assignment]
        try:
            yield
        finally:
            vars(environment).pop("from_string", None)


@contextmanager
def environment_read_once() -> Iterator[None]:
    """The machine is described once a process (lm-eval takes 2 s for it, in every evaluation), and git writes no error
    to stderr outside a repository."""
    module: Any = importlib.import_module("lm_eval.evaluator")  # `lm_eval` itself imports it when it evaluates
    own: dict[str, Callable[..., Any]] = {
        "add_env_info": lambda storage: storage.update(_environment()),
        "get_git_commit_hash": _commit,
    }
    with ExitStack() as undo:
        for name, replacement in own.items():
            found = getattr(module, name, None)
            if found is not None:
                setattr(module, name, replacement)
                undo.callback(setattr, module, name, found)
        yield


@functools.cache
def _environment() -> dict[str, Any]:
    storage: dict[str, Any] = {}
    lm_eval.loggers.utils.add_env_info(storage)
    return storage


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


@contextmanager
def quiet_bars(progress: bool) -> Iterator[None]:
    """Progress bars of other libraries appear on a terminal only, and without `progress` nothing appears anywhere."""
    disable = None if progress else True  # tqdm's None: only where stderr is a terminal
    with ExitStack() as undo:
        undo.callback(shown.reset, shown.set(progress))
        for name in _BARS:
            module: Any = sys.modules.get(name)
            bar = getattr(module, "tqdm", None)
            if isinstance(bar, type):
                module.tqdm = functools.partial(_bar, bar, disable)
                undo.callback(setattr, module, "tqdm", bar)
        loading: Any = sys.modules.get("transformers.utils.logging")
        if not (progress and sys.stderr.isatty()) and getattr(loading, "is_progress_bar_enabled", bool)():
            loading.disable_progress_bar()
            undo.callback(loading.enable_progress_bar)
        yield


@contextmanager
def quiet_data() -> Iterator[None]:
    """While tasks are loaded, `datasets` draws its bars on a terminal only, and leaves its errors to who catches
    them."""
    datasets: Any = importlib.import_module("datasets")  # which lm-eval has imported
    level, were_off = datasets.utils.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(level)
        if not were_off:
            datasets.enable_progress_bars()


def _bar(bar: Any, default: bool | None, *args: Any, **options: Any) -> Any:
    return bar(*args, **{**options, "disable": options.get("disable") or default})
