"""Patches of lm-eval while tasks are loaded or an evaluation runs, undone afterwards: templates in a sandbox, compiled
once; no code of the working directory, no noise. Only attributes that exist and are of the expected kind are replaced;
another version of lm-eval stays as it is. Knows no task and no model."""

from __future__ import annotations

import functools
import glob
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import lm_eval.utils
from jinja2.sandbox import SandboxedEnvironment

from olive_ext.backends.progress import shown
from olive_ext.model.files.content import digest_of

logger = logging.getLogger(__name__)

_BARS = ("tqdm", "lm_eval.api.model", "lm_eval.api.task", "lm_eval.models.huggingface")


_LOADING = threading.RLock()
"""Held while tasks are loaded: two threads would each replace what the other has replaced."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it, an attribute has another value. An inherited attribute is inherited again afterwards."""
    original, is_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Within it, templates of task files are rendered in jinja's sandbox, where no attribute leads to the interpreter,
    and compiled once; lm-eval renders them as code of its own, and compiles for every render (6.3 ms, not 0.05 ms)."""
    environment: Any = getattr(lm_eval.utils, "env", None)
    if type(environment) is not jinja2.Environment:
        yield
        return
    sandbox = SandboxedEnvironment(
        loader=environment.loader, undefined=environment.undefined, keep_trailing_newline=True
    )
    sandbox.filters.update(environment.filters)
    vars(sandbox)["from_string"] = functools.lru_cache(maxsize=4096)(sandbox.from_string)
    with replaced(lm_eval.utils, "env", sandbox):
        yield


@contextmanager
def exits_raised() -> Iterator[None]:
    """Within it, `os._exit` in a task's code raises `SystemExit`: it would end without a report, with status 0."""
    exit_process, process = os._exit, os.getpid()

    def exit_(status: int) -> NoReturn:
        if os.getpid() != process:  # a child that was forked
            exit_process(status)
        raise SystemExit(status)

    with replaced(os, "_exit", exit_):
        yield


@contextmanager
def no_code_of_the_working_directory() -> Iterator[None]:
    """Within it, what lm-eval starts runs nothing from the working directory, which may be a stranger's folder.

    Its results get no description of the machine (`python -m pip`, and 2 s in every evaluation) and of a working copy
    of git, whose configuration git obeys; reports have their own. Processes of its bootstrap's pool, which macOS and
    Windows start anew, inherit Python's switch, which Python 3.10 does not know.
    """
    module: Any = importlib.import_module("lm_eval.evaluator")  # `lm_eval` itself imports it when it evaluates
    with ExitStack() as undo:
        for name in ("add_env_info", "get_git_commit_hash"):
            if getattr(module, name, None) is not None:
                undo.enter_context(replaced(module, name, lambda *_: None))
        if "PYTHONSAFEPATH" not in os.environ:
            os.environ["PYTHONSAFEPATH"] = "1"
            undo.callback(os.environ.pop, "PYTHONSAFEPATH", None)
        yield


@contextmanager
def quiet_bars(progress: bool) -> Iterator[None]:
    """Within it, progress bars of other libraries appear on a terminal only, and without `progress` not at all."""
    disable = None if progress else True  # tqdm's None: only where stderr is a terminal
    with ExitStack() as undo:
        undo.callback(shown.reset, shown.set(progress))
        for name in _BARS:
            module: Any = sys.modules.get(name)
            bar = getattr(module, "tqdm", None)
            if isinstance(bar, type):
                undo.enter_context(replaced(module, "tqdm", functools.partial(_bar, bar, disable)))
        loading: Any = sys.modules.get("transformers.utils.logging")
        if not (progress and sys.stderr.isatty()) and getattr(loading, "is_progress_bar_enabled", bool)():
            loading.disable_progress_bar()
            undo.callback(loading.enable_progress_bar)
        yield


def _of_no_option(record: logging.LogRecord) -> bool:
    return "`--metadata` in console" not in record.getMessage()


@contextmanager
def quiet_data() -> Iterator[None]:
    """For the loading of tasks: `datasets` draws its bars on a terminal only, and leaves its errors to the caller. It
    knows local files in its cache by their content, too: by name and time alone, an edited file would not be read
    again. It does not take the name of an existing file for a pattern, whatever its folders' names contain. lm-eval
    names no option of its own command line, as it does for every task that makes its documents by it."""
    with _LOADING, ExitStack() as undo:
        files: Any = importlib.import_module("datasets.data_files")
        origin: Any = getattr(files, "_get_single_origin_metadata", None)
        resolve: Any = getattr(files, "resolve_pattern", None)

        def by_content(file: str, *args: Any, **options: Any) -> tuple[str, ...]:
            known: tuple[str, ...] = origin(file, *args, **options)
            return (*known, digest_of([("", Path(file))])) if Path(file).is_file() else known

        def of_file(pattern: str, base_path: str, *args: Any, **options: Any) -> list[str]:
            is_file = Path(base_path or "", pattern).is_file()
            resolved: list[str] = resolve(glob.escape(pattern) if is_file else pattern, base_path, *args, **options)
            return resolved

        for name, instead in (("resolve_pattern", of_file), ("_get_single_origin_metadata", by_content)):
            if hasattr(files, name):
                undo.enter_context(replaced(files, name, instead))
        noisy = logging.getLogger("lm_eval.api.task")
        noisy.addFilter(_of_no_option)
        undo.callback(noisy.removeFilter, _of_no_option)
        datasets: Any = importlib.import_module("datasets")  # which lm-eval has imported
        messages = datasets.utils.logging
        undo.callback(messages.set_verbosity, messages.get_verbosity())
        messages.set_verbosity(logging.CRITICAL)
        if not sys.stderr.isatty() and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            undo.callback(datasets.enable_progress_bars)
        yield


def _bar(bar: Any, default: bool | None, *args: Any, **options: Any) -> Any:
    return bar(*args, **{**options, "disable": options.get("disable") or default})
