"""The metrics that tasks declare: read from their files, without loading data, or from loaded tasks. Knows no model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from olive_ext.backends.task_loading import LoadedTasks, Spec, shipped_file, task_folders
from olive_ext.errors import named_failures

Declared = dict[str, Collection[str] | None]
"""Task to its metrics, each as "metric" and, for each of its filters, as "metric,filter"."""


def declared_metrics(specs: Sequence[Spec], include_path: str | Sequence[str] | None = None) -> Declared | None:
    """Every task of `specs` to the metrics in its `metric_list`; None for one without such a list, or with functions.

    None altogether where a name is a group, a tag, or lies in a file of another name: their tasks are only known once
    they are loaded. Raises `TaskError` for a missing folder or a broken file.
    """
    with named_failures("the tasks' metrics cannot be read", machine=()):
        index = TaskManager(include_path=task_folders(include_path), include_defaults=False).task_index
        configs = [_config(spec, index) for spec in specs]
        if not all(isinstance(config.get("task"), str) and "group" not in config for config in configs):
            return None
        return {config["task"]: _names(config.get("metric_list"), config.get("filter_list")) for config in configs}


def loaded_metrics(loaded: LoadedTasks) -> Declared:
    """The metrics of loaded tasks, and of the groups that aggregate any."""
    tasks = {name: _with_filters(task.aggregation(), _filters(task)) for name, task in loaded.tasks.items()}
    groups = {name: _of_group(group) for name, group in loaded.groups.items()}
    return {**tasks, **{name: metrics for name, metrics in groups.items() if metrics}}


def _of_group(group: Any) -> frozenset[str]:
    """The metrics that a group aggregates; one without filters is aggregated for all filters of the tasks."""
    of_tasks = {name for task in group.get_all_tasks() for name in _filters(task)}
    listed = group.aggregate_metric_list or ()
    return frozenset(name for item in listed for name in _with_filters([item.metric], item.filter_list or of_tasks))


def _filters(task: Any) -> list[str]:
    """The filters of a task; a task that is a Python class has no configuration to read them from."""
    return _filter_names(getattr(task.config, "filter_list", None))


def _config(spec: Spec, index: Mapping[str, Any]) -> Mapping[str, Any]:
    """The task's configuration; empty where no file holds one."""
    if isinstance(spec, Mapping):
        return spec
    path = index[spec].yaml_path if spec in index else shipped_file(spec)
    if path is None and spec.endswith((".yaml", ".yml")):
        path = Path(spec).expanduser()
    return load_yaml(path, resolve_func=False) if path is not None and path.is_file() else {}


def _names(metric_list: Any, filter_list: Any) -> frozenset[str] | None:
    """The metrics of a `metric_list`; None where one is a function, whose name is not known here."""
    entries = metric_list if isinstance(metric_list, list) else []
    names = [str(entry.get("metric")) for entry in entries if isinstance(entry, Mapping)]
    is_known = names and not any("." in name for name in names)
    return _with_filters(names, _filter_names(filter_list)) if is_known else None


def _filter_names(filter_list: Any) -> list[str]:
    """The names in a `filter_list`; lm-eval's name for no filter is "none"."""
    return [str(entry["name"]) for entry in filter_list or ()] or ["none"]


def _with_filters(names: Iterable[str], filters: Iterable[str]) -> frozenset[str]:
    filters = list(filters)
    return frozenset(full for name in names for full in (name, *(f"{name},{own}" for own in filters)))
