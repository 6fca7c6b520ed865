"""What tasks say about their metrics in their own files, without loading data. Knows no model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from olive_ext.backends.failures import named_failures
from olive_ext.backends.tasks import Spec, shipped_file, task_folders

Declared = dict[str, Collection[str] | None]


def declared_metrics(specs: Sequence[Spec], include_path: str | Sequence[str] | None = None) -> Declared | None:
    """Every task of `specs` to the metrics in its `metric_list`; None for one without such a list, or with functions.

    None altogether where a name is a group, a tag, or lies in a file of another name: only loading tells what those
    hold. Raises `TaskError` for a missing folder or a broken file.
    """
    with named_failures("the tasks' metrics cannot be read", machine=()):
        index = TaskManager(include_path=task_folders(include_path), include_defaults=False).task_index
        configs = [_config(spec, index) for spec in specs]
        if not all(isinstance(config.get("task"), str) and "group" not in config for config in configs):
            return None
        return {config["task"]: _names(config.get("metric_list")) for config in configs}


def _config(spec: Spec, index: Mapping[str, Any]) -> Mapping[str, Any]:
    """Empty where no file says anything of the task."""
    if isinstance(spec, Mapping):
        return spec
    path = index[spec].yaml_path if spec in index else shipped_file(spec)
    if path is None and spec.endswith((".yaml", ".yml")):
        path = Path(spec).expanduser()
    return load_yaml(path, resolve_func=False) if path is not None and path.is_file() else {}


def _names(metric_list: Any) -> frozenset[str] | None:
    """A metric that is a function has no name of its own here."""
    entries = metric_list if isinstance(metric_list, list) else []
    names = [str(entry.get("metric")) for entry in entries if isinstance(entry, Mapping)]
    return frozenset(names) if names and not any("." in name for name in names) else None
