"""The loading of lm-eval tasks, which comes before any model is opened, and the metrics that tasks declare: read from
their files, without loading data, or from loaded tasks. lm-eval's start reads all its 14,000 task files (10 to 45 s);
here they are read only where a name is a group, a tag, or lies in a file of another name. Knows no model."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from olive_ext.backends.code_eval import loading_metrics, pass_names, refuse_unconfined, refuse_unconfirmed
from olive_ext.backends.evaluated_task import Chosen, names_of, prepare
from olive_ext.backends.lm_eval_patches import exits_raised, quiet_data, sandboxed_templates
from olive_ext.backends.task_checks import made_tasks, refuse_definition
from olive_ext.backends.task_files import (
    Spec,
    TaskFiles,
    is_file,
    refuse_broken_files,
    refuse_unknown,
    shipped_files,
    task_folders,
    tasks_of,
    unknown,
)
from olive_ext.errors import TaskError, named_failures
from olive_ext.model.files.hub import offline_if_unreachable
from olive_ext.report.metrics import LENGTHS

Declared = dict[str, Collection[str] | None]
"""Task to its metrics, each as "metric" and, for each of its filters, as "metric,filter"."""


SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}
"""lm-eval's default seeds, by the names that `simple_evaluate` gives them."""


class LoadedTasks:
    """Stands in for lm-eval's `TaskManager`: `load` returns the tasks that are loaded already, and restores the states
    of the random generators after loading, so that lm-eval draws the same numbers as if it had loaded them itself."""

    def __init__(self, manager: TaskManager, loaded: Mapping[str, Any], seeds: Mapping[str, int]) -> None:
        self._loaded, self.seeds = loaded, seeds
        self._states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self.task_index = manager.task_index
        self.tasks: Mapping[str, Any] = loaded["tasks"]
        """Every leaf task by name."""

        self.groups: Mapping[str, Any] = loaded.get("groups", {})
        """Every group by name, subgroups too."""

        self._whole: dict[str, Chosen] = {}

    @property
    def configs(self) -> dict[str, Mapping[str, Any]]:
        """The configurations of the tasks that have one."""
        return {name: vars(task.config) for name, task in self.tasks.items() if task.config is not None}

    def of(self, documents: Mapping[str, Collection[int]]) -> LoadedTasks:
        """The same with these `documents` alone, by their numbers, and without the tasks that have none. Their prompts
        are those of a run over all: all requests are built once, for one model."""
        tasks = {name: copy.copy(self.tasks[name]) for name, numbers in documents.items() if numbers}
        for name, task in tasks.items():
            if name not in self._whole:
                self._whole[name] = Chosen((), task.eval_docs, {})
            task.chosen = replace(self._whole[name], numbers=sorted(documents[name]))
        other = copy.copy(self)
        other._loaded, other.tasks = {**self._loaded, "tasks": tasks}, tasks
        return other

    def load(self, _: object) -> Mapping[str, Any]:
        """lm-eval's `TaskDict`: tasks, groups and group_map."""
        python, numpy, torch_state = self._states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
        return self._loaded


def load_tasks(
    specs: Sequence[Spec],
    include_path: str | Sequence[str] | None = None,
    seed: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    runs_code: bool = False,
    repeats: int | None = None,
    thinks: bool = False,
) -> LoadedTasks:
    """Tasks by registered name, path of a YAML file, or inline definition; names under `include_path` come first.
    `seed` is for all four `SEEDS`; None takes lm-eval's. `metadata` is laid over each task's own, and given to the
    functions that make documents. `runs_code`: whether those may be among them that run what a model has written.
    `repeats` and `thinks` as in `evaluated_task.prepare`.

    Raises:
        TaskError: a name is unknown (the nearest names are given), a file or folder is missing, or a task's definition
            or data cannot be loaded.
    """
    with named_failures(f"tasks {_names(specs)} cannot be loaded", machine=()):
        manager, accepted = find_tasks(specs, include_path, metadata, runs_code=runs_code)
        seeds = SEEDS if seed is None else dict.fromkeys(SEEDS, seed)
        random.seed(seeds["random_seed"])  # some tasks draw from the global generators while they load
        np.random.seed(seeds["numpy_random_seed"])
        torch.manual_seed(seeds["torch_random_seed"])
        has_data = not all(_is_local(config_of(spec, manager.task_index)) for spec in specs)
        # A task renders its first document as it is made.
        templates, code = sandboxed_templates(), loading_metrics(runs_code)
        with exits_raised(), templates, code, made_tasks(), quiet_data(), offline_if_unreachable(has_data=has_data):
            loaded = LoadedTasks(manager, manager.load(accepted), seeds)
        refuse_unconfined(loaded.tasks, runs_code)
        prepare(loaded.tasks, repeats, thinks=thinks)
        return loaded


def find_tasks(
    specs: Sequence[Spec],
    include_path: str | Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    runs_code: bool = False,
) -> tuple[TaskManager, list[Any]]:
    """lm-eval's manager of tasks, and `specs` as it loads them, without their data. Raises `TaskError` as `load_tasks`
    does for what is unknown or missing."""
    folders = task_folders(include_path)
    files = TaskFiles(specs, folders)
    files.refuse_endless()
    extra = dict(metadata or {})
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=extra)
    resolved = [_find(spec, manager.task_index) for spec in specs]
    for config in (config for spec in specs for config in leaves(spec, manager.task_index)):
        refuse_definition(config, str(config["task"]), files.referenced()[1].items())
        refuse_unconfirmed(config, str(config["task"]), runs_code)
    files.refuse_doubled_keys()
    if missing := [name for _, names in resolved for name in names]:
        refuse_broken_files(missing, folders)
        refuse_unknown(missing, folders)
        manager = TaskManager(include_path=folders, metadata=extra)
        resolved = [_find(spec, manager.task_index) for spec in specs]
        if still_missing := [name for _, names in resolved for name in names]:
            raise unknown(still_missing, manager.all_tasks, folders)
    return manager, [spec for spec, _ in resolved]


def _is_local(config: Mapping[str, Any]) -> bool:
    """Whether a task's documents are surely not on the hub."""
    path = config.get("dataset_path")
    is_format = isinstance(path, str) and ("/" not in path or Path(path).exists())
    return "class" not in config and (is_format or config.get("custom_dataset") is not None)


def _names(specs: Sequence[Spec]) -> str:
    names = [spec if isinstance(spec, str) else str(spec.get("task") or spec.get("group")) for spec in specs]
    return ", ".join(repr(name) for name in names)


def _find(spec: Spec, index: Mapping[str, Any]) -> tuple[str | dict[str, Any], list[str]]:
    """The spec as lm-eval's `TaskManager` over `index` accepts it, and the names in it that `index` lacks."""
    if isinstance(spec, Mapping):
        if "task" not in spec and "group" not in spec:
            raise TaskError(f"an inline task needs 'task' or 'group', and has {sorted(spec)}", code="missing")
        return dict(spec), _missing(spec, index)
    if spec not in index and is_file(spec) and not Path(spec).expanduser().is_file():
        raise TaskError(f"unknown task '{spec}': no such file", code="not_found").about("tasks", spec)
    if spec in index or is_file(spec):
        return spec, _missing(spec, index)
    shipped = shipped_file(spec)
    return (str(shipped), []) if shipped else (spec, [spec])


def _missing(spec: Spec, index: Mapping[str, Any]) -> list[str]:
    """Names that a group refers to and that `index` lacks; lm-eval would treat them as new, empty tasks."""
    members = [member for member in tasks_of(spec, index) if member is not spec]
    new_task_keys = {"dataset_path", "class"}  # of a new task
    names = [one.get("task") if isinstance(one, Mapping) and not new_task_keys & {*one} else one for one in members]
    return [name for name in names if isinstance(name, str) and name not in index]


def shipped_file(name: str) -> Path | None:
    """lm-eval's own file NAME.yaml, where there is exactly one and it defines the task NAME and no group."""
    paths = shipped_files().get(name, ())
    if len(paths) != 1:
        return None
    text = paths[0].read_text(encoding="utf-8")
    is_task = re.search(rf"^task:\s*[\"']?{re.escape(name)}[\"']?\s*$", text, re.MULTILINE)
    return paths[0] if is_task and not re.search(r"^(group|class):", text, re.MULTILINE) else None


def declared_metrics(
    specs: Sequence[Spec],
    include_path: str | Sequence[str] | None = None,
    repeats: int | None = None,
    *,
    thinks: bool = False,
) -> Declared | None:
    """Every task of `specs` to the metrics in its `metric_list`; None for one without such a list, or with functions.

    None altogether where a name is a group, a tag, or lies in a file of another name: their tasks are only known once
    they are loaded. Raises `TaskError` for a missing folder or a broken file.
    """
    with named_failures("the tasks' metrics cannot be read", machine=()):
        folders = task_folders(include_path)
        TaskFiles(specs, folders).refuse_endless()
        index = TaskManager(include_path=folders, include_defaults=False).task_index
        configs = [config_of(spec, index) for spec in specs]
        if not all(isinstance(config.get("task"), str) and "group" not in config for config in configs):
            return None
        return {config["task"]: _listed(config, repeats, thinks) for config in configs}


def loaded_metrics(loaded: LoadedTasks) -> Declared:
    """The metrics of loaded tasks, and of the groups that aggregate any. Raises `TaskError` for what is no list of a
    group's metrics."""
    with named_failures("the tasks' metrics cannot be read"):
        tasks = {name: _of_task(task) for name, task in loaded.tasks.items()}
        groups = {}
        for name, group in loaded.groups.items():  # a metric without filters is aggregated for all of the tasks'
            of_tasks = frozenset[str]().union(*map(_of_task, group.get_all_tasks()))
            listed = group.aggregate_metric_list or ()
            every = {item.metric for item in listed if not item.filter_list}
            named = (_with_filters([item.metric], item.filter_list) for item in listed if item.filter_list)
            groups[name] = {full for full in of_tasks if full.partition(",")[0] in every}.union(*named)
        return {**tasks, **{name: frozenset(metrics) for name, metrics in groups.items() if metrics}}


def _of_task(task: Any) -> frozenset[str]:
    """The metrics of a task; one that is a Python class has no configuration to read its filters from."""
    filters = _filter_names(getattr(task.config, "filter_list", None))
    return _with_filters([*task.aggregation(), *pass_names(task)], filters)


def config_of(spec: Spec, index: Mapping[str, Any]) -> Mapping[str, Any]:
    """The task's configuration; empty where no file holds one."""
    if isinstance(spec, Mapping):
        return spec
    path = index[spec].yaml_path if spec in index else shipped_file(spec)
    if path is None and spec.endswith((".yaml", ".yml")):
        path = Path(spec).expanduser()
    return load_yaml(path, resolve_func=False) if path is not None and path.is_file() else {}


def declared_configs(
    specs: Sequence[Spec], include_path: str | Sequence[str] | None = None, *, runs_code: bool = False
) -> dict[str, Mapping[str, Any]]:
    """The configuration of every task of `specs` that is defined in a file, by name, without its data. Python classes
    and members of a tag are left out. Raises `TaskError` as `find_tasks`."""
    manager, _ = find_tasks(specs, include_path, runs_code=runs_code)
    configs = [config for spec in specs for config in leaves(spec, manager.task_index)]
    return {str(config["task"]): config for config in configs if "class" not in config}


def leaves(spec: Spec, index: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configurations of the tasks that a task or group stands for; those that no file holds are left out."""
    members = (member for member in tasks_of(spec, index) if isinstance(member, str | Mapping))
    return (config for config in (config_of(one, index) for one in members) if isinstance(config.get("task"), str))


def _listed(config: Mapping[str, Any], repeats: int | None, thinks: bool) -> frozenset[str] | None:
    """The metrics of a configuration; None where one is a function, whose name is not known here."""
    metric_list, filters = config.get("metric_list"), _filter_names(config.get("filter_list"))
    is_generated = config.get("output_type") == "generate_until"
    more = names_of(repeats or config.get("repeats"), thinks=thinks) if is_generated else ()
    entries = metric_list if isinstance(metric_list, list) else []
    names = [str(entry.get("metric")) for entry in entries if isinstance(entry, Mapping)]
    is_known = names and not any("." in name for name in names)
    return _with_filters([*names, *more], filters) if is_known else None


def _filter_names(filter_list: Any) -> list[str]:
    """The names in a `filter_list`; lm-eval's name for no filter is "none"."""
    return [str(entry["name"]) for entry in filter_list or ()] or ["none"]


def _with_filters(names: Iterable[str], filters: Sequence[str]) -> frozenset[str]:
    """Each name alone and with each filter; lengths of answers are measured once, with the first."""
    pairs = ((name, filters[: 1 if name in LENGTHS else None]) for name in names)
    return frozenset(full for name, own in pairs for full in (name, *(f"{name},{each}" for each in own)))
