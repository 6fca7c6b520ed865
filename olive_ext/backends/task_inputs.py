"""What tasks ask of a model: read from their files, without loading data, or from loaded tasks. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from olive_ext.backends.task_loading import LoadedTasks, find_tasks, leaves
from olive_ext.backends.task_names import Spec


@dataclass(frozen=True)
class TaskInputs:
    """A task, and what its requests have."""

    task: str
    gives_images: bool
    gives_audio: bool
    is_rolling: bool
    """Whether it scores whole texts, without a context."""

    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The task's configuration."""


def declared_inputs(
    specs: Sequence[Spec], include_path: str | Sequence[str] | None = None, *, runs_code: bool = False
) -> list[TaskInputs]:
    """Of every task of `specs` that is defined in a file; those that are Python classes, or members of a tag, are left
    out. Raises `TaskError` for unknown tasks, and without `runs_code` for those that run what a model has written."""
    manager, _ = find_tasks(specs, include_path, runs_code=runs_code)
    configs = [config for spec in specs for config in leaves(spec, manager.task_index)]
    return [_inputs(str(config["task"]), config) for config in configs if "class" not in config]


def loaded_inputs(tasks: LoadedTasks) -> list[TaskInputs]:
    """Of every loaded task that has a configuration."""
    return [_inputs(name, vars(task.config)) for name, task in tasks.tasks.items() if task.config is not None]


def _inputs(name: str, config: Mapping[str, Any]) -> TaskInputs:
    return TaskInputs(
        name,
        gives_images=config.get("doc_to_image") is not None,
        gives_audio=config.get("doc_to_audio") is not None,
        is_rolling=config.get("output_type") == "loglikelihood_rolling",
        config=config,
    )
