"""Patches that take avoidable cost and noise out of lm-eval while an evaluation runs, undone afterwards.

Only attributes that exist and are of the expected kind are replaced; another version of lm-eval stays as it is.
Knows no task and no model.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jinja2
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
def no_code_of_the_working_directory() -> Iterator[None]:
    """What lm-eval starts runs nothing that lies in the working directory, which may be a stranger's folder.

    Its results are left without a description of the machine (`python -m pip`, and 2 s in every evaluation) and of a
    working copy of git, whose configuration git obeys; reports have their own. Processes of its bootstrap's pool, which
    macOS and Windows start anew, inherit Python's switch, which Python 3.10 does not know.
    """
    module: Any = importlib.import_module("lm_eval.evaluator")  # `lm_eval` itself imports it when it evaluates
    with ExitStack() as undo:
        for name in ("add_env_info", "get_git_commit_hash"):
            found = getattr(module, name, None)
            if found is not None:
                setattr(module, name, lambda *_: None)
                undo.callback(setattr, module, name, found)
        if "PYTHONSAFEPATH" not in os.environ:
            os.environ["PYTHONSAFEPATH"] = "1"
            undo.callback(os.environ.pop, "PYTHONSAFEPATH", None)
        yield


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
