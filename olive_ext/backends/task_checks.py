"""What is wrong with tasks, found before a model is asked: unknown metrics and aggregations, too few documents for the
examples, documents without choices or a target. Knows no model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from numbers import Real
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError
from lm_eval import evaluator_utils
from lm_eval.api.registry import AGGREGATION_REGISTRY, METRIC_REGISTRY
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.group import GroupConfig
from lm_eval.config.task import TaskConfig

from olive_ext.backends.lm_eval_patches import replaced
from olive_ext.backends.task_files import data_files
from olive_ext.config.base import MOST_REPEATS
from olive_ext.errors import ANY_FAILURE, TaskError, first_line, keys_once, named_failures, one_line, suggest
from olive_ext.report.metrics import as_number

logger = logging.getLogger(__name__)

_KEYS = {field.name for kind in (TaskConfig, GroupConfig) for field in fields(kind)} | {"include", "task_list"}


def refuse_definition(
    config: Mapping[str, Any], name: str, files: Iterable[tuple[Path, Mapping[str, Any]]] = ()
) -> None:
    """Raises `TaskError` for a key, a metric or an aggregation that lm-eval does not have, and for a number of answers
    to each document, or of examples, that no evaluation can have. lm-eval itself looks for an unknown metric on the
    network, and calls an unknown aggregation when all answers are there. Metrics that a task computes itself
    (`process_results`) have any name. The error names the one of the task's `files` that has the unknown key."""
    for key in () if "class" in config else sorted(config.keys() - _KEYS):
        path = next((f", '{path}'" for path, content in files if key in content), "")
        hint = suggest(key, _KEYS) or f"there are {', '.join(sorted(_KEYS))}"
        raise TaskError(f"task '{name}'{path}: unknown key '{key}': {hint}", code="unknown_key")
    listed, computes = config.get("metric_list"), config.get("process_results") is not None
    for entry in (entry for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, Mapping)):
        metric, aggregation = entry.get("metric"), entry.get("aggregation")
        if not (isinstance(metric, str) or callable(metric)):
            raise TaskError(f"task '{name}' has the metric {metric!r} in 'metric_list': give a name or a function")
        is_known = computes or entry.get("hf_evaluate") or metric in METRIC_REGISTRY
        if _is_plain(metric) and not is_known:
            raise TaskError(f"task '{name}': unknown metric '{metric}'; {_known(METRIC_REGISTRY)}", code="unknown_name")
        if aggregation is None and (callable(metric) or metric not in METRIC_REGISTRY):
            known = f"which only metrics of lm-eval have of their own: {_known(AGGREGATION_REGISTRY)}"
            called = getattr(metric, "__name__", metric)
            raise TaskError(f"task '{name}': the metric '{called}' has no 'aggregation', {known}")
        if _is_plain(aggregation) and aggregation not in AGGREGATION_REGISTRY:
            known = _known(AGGREGATION_REGISTRY)
            raise TaskError(f"task '{name}' has the unknown aggregation '{aggregation}'; {known}", code="unknown_name")
        if not isinstance(better := entry.get("higher_is_better"), bool | None):
            raise TaskError(f"task '{name}': 'higher_is_better' = {better!r}: give true or false", code="wrong_value")
    filters = config.get("filter_list")
    for entry in filters if isinstance(filters, list) else ():
        if not (isinstance(entry, Mapping) and {"name", "filter"} <= entry.keys()):
            raise TaskError(f"task '{name}' has {entry!r} in 'filter_list': a 'name' and a 'filter' are expected")
    repeats, shots = config.get("repeats", 1), config.get("num_fewshot")
    if not isinstance(repeats, int) or isinstance(repeats, bool) or not 1 <= repeats <= MOST_REPEATS:
        problem = f"task '{name}': give an integer from 1 to {MOST_REPEATS}"
        raise TaskError(problem, "repeats", repeats, code="wrong_value")
    if shots is not None and (not isinstance(shots, int) or isinstance(shots, bool) or shots < 0):
        raise TaskError(f"task '{name}': give an integer from 0", "num_fewshot", shots, code="wrong_value")


def _is_plain(name: object) -> bool:
    """Whether it is no function: lm-eval names these by file and function, with a dot."""
    return isinstance(name, str) and not ("." in name and name.rpartition(".")[2].isidentifier())


def _known(registry: Any) -> str:
    return f"there are {', '.join(sorted(registry.keys()))}"


def refuse_shots(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    """Raises `TaskError` where a task has fewer documents to take examples from than a prompt needs. Names the tasks
    that do not follow `num_fewshot`, because their own setting is 0."""
    fixed = [name for name, task in tasks.items() if num_fewshot and task.get_config("num_fewshot") == 0]
    if fixed:
        logger.warning("'num_fewshot' = %s is not used by %s, whose own setting is 0", num_fewshot, ", ".join(fixed))
    for name, task in tasks.items():
        wanted = task.get_config("num_fewshot") if num_fewshot is None or name in fixed else num_fewshot
        documents: Any = task.fewshot_docs() if wanted else None
        if hasattr(documents, "__len__") and len(documents) < wanted + _draws_from_its_own(task.config):
            problem = f"task '{name}' has {len(documents)} documents to draw from"
            raise TaskError(problem, "num_fewshot", wanted, code="wrong_value")


def _draws_from_its_own(config: Any) -> bool:
    """Whether examples come from the documents that are evaluated, so that one of them is left out each time."""
    fewshot = config.fewshot_config
    if fewshot is not None and fewshot.split is None and fewshot.samples is not None:
        return False
    splits = [config.fewshot_split, config.training_split, config.validation_split, config.test_split]
    return bool(next(filter(None, splits), None) == (config.test_split or config.validation_split))


@contextmanager
def made_tasks() -> Iterator[None]:
    """While tasks are loaded, an error in data or in the first document names task, and file and line, or document."""
    make = ConfigurableTask.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        config = options.get("config") or {}
        name = str(config.get("task"))
        refuse_definition(config, name)
        try:
            make(self, *args, **options)
        except ANY_FAILURE as error:
            if (fault := _data_fault(self, config, error)) is not None:
                raise TaskError(f"task '{name}'{fault}") from error
            with named_failures(f"task '{name}'{', document 0' if hasattr(self, 'task_docs') else ''}", machine=()):
                raise
        with named_failures(f"task '{name}', 'filter_list'"):
            for kind in (kind for ensemble in getattr(self, "_filters", ()) for kind in ensemble.filters):
                kind()  # lm-eval makes them when all answers are there

    listed = listed_choices(ConfigurableTask.doc_to_choice)
    with replaced(ConfigurableTask, "__init__", made), replaced(ConfigurableTask, "doc_to_choice", listed):
        yield


def listed_choices(own: Any) -> Any:
    """lm-eval's `doc_to_choice` without its mistake of taking the letters of a text for choices."""

    def listed(self: Any, *args: Any, **options: Any) -> Any:
        choices = own(self, *args, **options)
        if isinstance(choices, str):
            raise ValueError(f"its choices are the text {choices[:80]!r}: a list is expected")
        return choices

    return listed


def _data_fault(task: Any, config: Mapping[str, Any], error: BaseException) -> str | None:
    """The fault in a task's data because of which it cannot be made."""
    if hasattr(task, "task_docs") and isinstance(error, UndefinedError) and len(task.task_docs):
        return f", document 0: {first_line(error)}; its columns are {', '.join(map(repr, task.task_docs[0]))}"
    splits = getattr(task, "dataset", None)
    named = [config.get(f"{part}_split") for part in ("training", "validation", "test", "fewshot")]
    missing = error.args[0] if isinstance(error, KeyError) and error.args[0] in named else None
    if missing is not None and isinstance(splits, Mapping) and missing not in splits:
        return f": its data have no split {missing!r}, there are {', '.join(map(repr, splits))}"
    if hasattr(task, "task_docs") and not len(task.task_docs):
        return ": it has no documents"
    if splits is not None and not isinstance(error, UnicodeError):
        return None
    files, reasons = data_files(config), list[str]()
    if fault := next(filter(None, map(_broken_line, files)), None):
        return fault
    cause: BaseException | None = error
    while cause is not None:  # datasets' own error says nothing
        reasons += [] if type(cause).__name__ == "DatasetGenerationError" else [one_line(cause)]
        cause = cause.__cause__ or cause.__context__
    return f", {', '.join(map(repr, map(str, files)))}: {'; '.join(reasons)}" if files else None


def _broken_line(file: Path) -> str | None:
    """The first line of JSON lines that is not JSON, with the reason."""
    number, content = 0, file.read_bytes().strip() if file.suffix in (".json", ".jsonl") and file.is_file() else b"["
    try:
        for number, line in enumerate(() if content.startswith(b"[") else content.split(b"\n"), 1):  # noqa: B007
            json.loads(line, object_pairs_hook=keys_once)
    except (ValueError, RecursionError) as error:
        return f", '{file}', line {number}: {first_line(error)}"
    return None


@contextmanager
def named_aggregations() -> Iterator[None]:
    """While an evaluation runs, an error in aggregating a task's values names the task."""
    aggregate = evaluator_utils._compute_task_aggregations

    def aggregated(task: Any, *args: Any, **options: Any) -> Any:
        with named_failures(f"task '{task.task_name}', its metrics"):
            results, count = aggregate(task, *args, **options)
        values = {name: as_number(value) for name, value in results.items()}
        for name in [name for name, value in values.items() if not isinstance(value, Real) and "_stderr," not in name]:
            logger.warning("task '%s': %s is %.80r, no number: it is no metric", task.task_name, name, values[name])
        return values, count

    with replaced(evaluator_utils, "_compute_task_aggregations", aggregated):
        yield
