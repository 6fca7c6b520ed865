"""What is wrong with tasks, found before a model is asked: files that cannot be parsed, metrics and aggregations that
lm-eval does not have, too few documents for the examples, documents without choices or without a target. Knows no
model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from lm_eval.api.registry import AGGREGATION_REGISTRY, METRIC_REGISTRY
from lm_eval.api.task import ConfigurableTask

from olive_ext.errors import TaskError, counted, first_line

logger = logging.getLogger(__name__)

LARGEST_FILE = 4 * 2**20
"""Bytes of a task file: lm-eval's largest has 150 thousand."""


class _Function(str):
    """The name of a function in a task file."""


class _Reader(yaml.SafeLoader):
    """Reads a task file without importing the functions that it names."""


_Reader.add_multi_constructor(
    "!", lambda loader, suffix, node: _Function(node.value) if isinstance(node, yaml.ScalarNode) else None
)


def read_task(path: Path) -> Mapping[str, Any]:
    """A task file's content. Raises `TaskError` with the reason, the file and the line where it cannot be parsed."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise TaskError(f"task file '{path}' has {path.stat().st_size:,} bytes, more than {LARGEST_FILE:,}")
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_Reader)
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
    """Raises `TaskError` where the file of a task that is missing is there, and cannot be parsed: lm-eval passes over
    such files, and calls the task unknown."""
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.y*ml")):
            if path.stem in names:
                read_task(path)


def functions_in(tasks: Sequence[object], folders: Sequence[str]) -> dict[Path | str, list[str]]:
    """The functions that task files name (`!function`), by the Python file, or the installed module, that they lie in.

    Looks at the files in `folders`, at those among `tasks`, and at what these include; imports nothing. lm-eval runs
    the functions of the tasks that are chosen. Files that cannot be parsed have none.
    """
    waiting = [path for folder in folders for path in sorted(Path(folder).rglob("*.y*ml"))]
    waiting += [Path(task).expanduser() for task in tasks if isinstance(task, str) and task.endswith((".yaml", ".yml"))]
    found: dict[Path | str, set[str]] = {}
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        try:
            config = read_task(path)
        except TaskError:
            continue
        included = config.get("include") or []
        waiting += [path.parent / str(name) for name in (included if isinstance(included, list) else [included])]
        for name in _functions(config):
            module, _, function = name.rpartition(".")
            file = path.parent / f"{module.replace('.', '/')}.py"
            found.setdefault(file.resolve() if file.exists() else module, set()).add(function)
    return {place: sorted(names) for place, names in sorted(found.items(), key=lambda item: str(item[0]))}


def _functions(value: object) -> Iterator[str]:
    if isinstance(value, _Function):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _functions(item)


def refuse_metrics(config: Mapping[str, Any], name: str) -> None:
    """Raises `TaskError` for a metric or an aggregation that lm-eval does not have. lm-eval itself looks for an unknown
    metric on the network, and calls an unknown aggregation when all answers are there. Metrics that a task computes
    itself (`process_results`) have any name."""
    listed, computes = config.get("metric_list"), config.get("process_results") is not None
    for entry in (entry for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, Mapping)):
        metric, aggregation = entry.get("metric"), entry.get("aggregation")
        if not (isinstance(metric, str) or callable(metric)):
            raise TaskError(f"task '{name}' has the metric {metric!r} in 'metric_list': give a name or a function")
        is_known = computes or entry.get("hf_evaluate") or metric in METRIC_REGISTRY
        if _is_plain(metric) and not is_known:
            raise TaskError(f"task '{name}' has the unknown metric '{metric}'; {_known(METRIC_REGISTRY)}")
        if _is_plain(aggregation) and aggregation not in AGGREGATION_REGISTRY:
            raise TaskError(
                f"task '{name}' has the unknown aggregation '{aggregation}'; {_known(AGGREGATION_REGISTRY)}"
            )


def _is_plain(name: object) -> bool:
    """Whether it is no function: lm-eval names these by file and function, with a dot."""
    return isinstance(name, str) and not ("." in name and name.rpartition(".")[2].isidentifier())


def _known(registry: Any) -> str:
    return f"there are {', '.join(sorted(registry.keys()))}"


def refuse_shots(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    """Raises `TaskError` where a task has fewer documents to take examples from than a prompt is to have. Says which
    tasks do not follow `num_fewshot`, because their own setting is 0."""
    fixed = [name for name, task in tasks.items() if num_fewshot and task.get_config("num_fewshot") == 0]
    if fixed:
        logger.warning("'num_fewshot' = %s is not used by %s, whose own setting is 0", num_fewshot, ", ".join(fixed))
    for name, task in tasks.items():
        wanted = task.get_config("num_fewshot") if num_fewshot is None or name in fixed else num_fewshot
        documents: Any = task.fewshot_docs() if wanted else None
        if hasattr(documents, "__len__") and len(documents) < wanted + _draws_from_its_own(task.config):
            raise TaskError(
                f"'num_fewshot' = {wanted}: task '{name}' has {counted(len(documents), 'document')} to take examples "
                "from"
            )


def _draws_from_its_own(config: Any) -> bool:
    """Whether examples come from the documents that are evaluated, so that one of them is left out each time."""
    splits = [config.fewshot_split, config.training_split, config.validation_split, config.test_split]
    return bool(next(filter(None, splits), None) == (config.test_split or config.validation_split))


@contextmanager
def checked_documents() -> Iterator[None]:
    """While an evaluation runs, a document without choices, or whose target is missing, raises `TaskError` as its
    requests are built, which is before any of them is asked."""
    construct = ConfigurableTask.construct_requests

    def checked(self: Any, doc: Any, ctx: Any, **options: Any) -> Any:
        if problem := _problem(self, doc):
            number = (options.get("metadata") or ("?", "?"))[1]
            raise TaskError(f"task '{self.config.task}', document {number}: {problem}")
        return construct(self, doc, ctx, **options)

    ConfigurableTask.construct_requests = checked
    try:
        yield
    finally:
        ConfigurableTask.construct_requests = construct


def _problem(task: Any, doc: Any) -> str | None:
    config = task.config
    if config.output_type == "multiple_choice" and not task.doc_to_choice(doc):
        return "it has no choices"
    if config.doc_to_target is None or callable(config.process_results):
        return None
    target = task.doc_to_target(doc)
    is_missing = target is None or (config.output_type == "multiple_choice" and target in ("", "None"))
    return f"its target is {target!r}" if is_missing else None
