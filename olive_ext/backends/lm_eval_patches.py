"""Patches of lm-eval while tasks are loaded or an evaluation runs, undone afterwards: templates in a sandbox, compiled
once; no code of the working directory, no noise; pictures and sounds of examples ("shots"), whose texts lm-eval puts
into a prompt, with a marker for each, giving the model those of the document alone.

Only attributes that exist and are of the expected kind are replaced; another version of lm-eval stays as it is.
Knows no task and no model.
"""

from __future__ import annotations

import functools
import glob
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import lm_eval.utils
from lm_eval.api.task import ConfigurableTask

from olive_ext.backends.progress import shown
from olive_ext.errors import named_failures
from olive_ext.media.pictures import media_digest
from olive_ext.model.files.content import digest_of
from olive_ext.session.bounded_templates import BoundedEnvironment, replaced

logger = logging.getLogger(__name__)

_BARS = ("tqdm", "lm_eval.api.model", "lm_eval.api.task", "lm_eval.models.huggingface")


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Templates of task files are rendered in jinja's sandbox, where they reach no attribute that leads to the
    interpreter, and within limits: lm-eval renders them as code of its own. Each is compiled once: lm-eval compiles
    anew for every render (6.3 ms against 0.05 ms)."""
    own: Any = getattr(lm_eval.utils, "env", None)
    if type(own) is not jinja2.Environment:
        yield
        return
    sandbox = BoundedEnvironment(loader=own.loader, undefined=own.undefined, keep_trailing_newline=True)
    sandbox.filters.update(own.filters)
    vars(sandbox)["from_string"] = functools.lru_cache(maxsize=4096)(sandbox.from_string)
    with replaced(lm_eval.utils, "env", sandbox):
        yield


@contextmanager
def exits_raised() -> Iterator[None]:
    """`os._exit` of a task's code raises `SystemExit`: it would end the process without a report, and with status 0."""
    own, process = os._exit, os.getpid()

    def exit_(status: int) -> NoReturn:
        if os.getpid() != process:  # a child that was forked
            own(status)
        raise SystemExit(status)

    with replaced(os, "_exit", exit_):
        yield


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
            if getattr(module, name, None) is not None:
                undo.enter_context(replaced(module, name, lambda *_: None))
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
    """While tasks are loaded, `datasets` draws its bars on a terminal only, leaves its errors to who catches them, and
    knows local files in its cache by their content, too: by name and time alone an edited file would not be read; and
    takes the name of a file that is there for no pattern, whatever its folders have in theirs.
    lm-eval names no option of its own command line, which every task that makes its documents has it do."""
    files: Any = importlib.import_module("datasets.data_files")
    origin: Any = getattr(files, "_get_single_origin_metadata", None)

    def by_content(file: str, *args: Any, **options: Any) -> tuple[str, ...]:
        known: tuple[str, ...] = origin(file, *args, **options)
        return (*known, digest_of([("", Path(file))])) if Path(file).is_file() else known

    resolve: Any = files.resolve_pattern

    def of_file(pattern: str, base_path: str, *args: Any, **options: Any) -> list[str]:
        is_file = Path(base_path or "", pattern).is_file()
        resolved: list[str] = resolve(glob.escape(pattern) if is_file else pattern, base_path, *args, **options)
        return resolved

    datasets: Any = importlib.import_module("datasets")  # which lm-eval has imported
    noisy = logging.getLogger("lm_eval.api.task")
    noisy.addFilter(_of_no_option)
    level, were_off = datasets.utils.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        with ExitStack() as undo:
            undo.enter_context(replaced(files, resolve.__name__, of_file))
            if origin is not None:
                undo.enter_context(replaced(files, origin.__name__, by_content))
            yield
    finally:
        noisy.removeFilter(_of_no_option)
        datasets.utils.logging.set_verbosity(level)
        if not were_off:
            datasets.enable_progress_bars()


def _bar(bar: Any, default: bool | None, *args: Any, **options: Any) -> Any:
    return bar(*args, **{**options, "disable": options.get("disable") or default})


_SHOTS = "_olive_ext_shots"
"""The attribute of a task that holds the examples of the prompt that it made last."""

_FIELDS = {"visual": "doc_to_image", "audio": "doc_to_audio"}
"""The media of a request, and the task's function for them."""


class _Document(dict[str, Any]):
    """A document that is compared by what its pictures and sounds hold: arrays have no `==`, and that of a picture that
    cannot be read raises."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        try:
            return dict.__eq__(self, other)
        except Exception:  # noqa: BLE001 - of whatever a data set holds
            return media_digest([dict(self)]) == media_digest([other])

    def __ne__(self, other: object) -> bool:
        return not self == other


@contextmanager
def media_of_shots() -> Iterator[None]:
    """While it lasts, requests of tasks with examples hold the pictures and sounds of these before the document's own,
    in the order of the prompt."""
    task: Any = ConfigurableTask
    own_examples: list[bool] = []
    with (
        replaced(task, "fewshot_context", noting_shots(task.fewshot_context, own_examples)),
        replaced(task, "construct_requests", _adding(task.construct_requests)),
        replaced(task, "build_all_requests", _noting_own_examples(task.build_all_requests, own_examples)),
    ):
        yield


def _noting_own_examples(build: Any, own_examples: list[bool]) -> Any:
    """`build_all_requests` with a line on prompts in which the document itself, with its answer, is an example:
    lm-eval leaves it out only where 'fewshot_split' names the split that is evaluated."""

    def built(task: Any, *args: Any, **options: Any) -> Any:
        own_examples.clear()
        with named_failures(f"task '{task.config.task}'"):
            build(task, *args, **options)
        if count := sum(own_examples):
            words = (
                "task '%s': %d of %d prompts have the document itself among the examples: 'fewshot_split: %s' in the "
            )
            split = task.config.test_split or task.config.validation_split
            logger.warning(words + "task's file leaves it out", task.config.task, count, len(own_examples), split)

    return built


def noting_shots(make_context: Any, own_examples: list[bool]) -> Any:
    """`ConfigurableTask.fewshot_context` that notes which examples the task's sampler has drawn, and in `own_examples`
    whether the document itself is among them."""

    def noted(task: Any, doc: Any, *args: Any, **options: Any) -> Any:
        vars(task)[_SHOTS] = []
        sampler = getattr(task, "sampler", None)
        if sampler is None:
            return make_context(task, doc, *args, **options)

        def sample(*given: Any, **more: Any) -> Any:
            if isinstance(document := more.get("eval_doc"), dict):
                more["eval_doc"] = _Document(document)
            shots = vars(task)[_SHOTS] = list(type(sampler).sample(sampler, *given, **more))
            document = _Document(doc) if isinstance(doc, dict) else doc
            own_examples.append(any(document == shot for shot in shots))
            return shots

        with replaced(sampler, "sample", sample):
            return make_context(task, doc, *args, **options)

    return noted


def _adding(construct: Any) -> Any:
    """`ConfigurableTask.construct_requests` with what the noted examples hold besides text."""

    def added(task: Any, *args: Any, **options: Any) -> Any:
        made = construct(task, *args, **options)
        shots = vars(task).pop(_SHOTS, [])
        for request in (made if isinstance(made, list) else [made]) if shots else ():
            request.arguments = tuple(
                _with_shots(task, part, shots) if isinstance(part, Mapping) and part.keys() & _FIELDS.keys() else part
                for part in request.arguments
            )
        return made

    return added


def _with_shots(task: Any, given: Mapping[str, Any], shots: list[Any]) -> dict[str, Any]:
    media = dict(given)
    for name in media.keys() & _FIELDS.keys():
        parts = [getattr(task, _FIELDS[name])(shot) for shot in shots]
        media[name] = [item for part in (*parts, media[name]) for item in as_list(part)]
    return media


def as_list(given: Any) -> list[Any]:
    """The items that a task's function gives: none, one or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
