"""Chooses how a configuration's reference is run: both models resident, or one after the other. Opens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from olive_ext.config import INPUT_MODEL, EvaluationConfig, ReferenceConfig
from olive_ext.errors import ConfigError
from olive_ext.model import ResolvedModel
from olive_ext.run.costs import PEAK_MEMORY, TOKENS_PER_SECOND, asked_costs
from olive_ext.run.models import Models
from olive_ext.run.reference.comparison_run import Comparer, Mode

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks, Seeds

MEMORY_FACTOR = 2.0
"""Memory that a model is expected to take, over its size on disk: weights, unpacked ones, KV cache and logits."""


def comparer_of(models: Models, lm: LM | None, tasks: LoadedTasks, seeds: Seeds) -> Comparer | None:
    """The comparer with the reference of `models`; None without one, or where it is the evaluated lm-eval model itself.

    `lm` is an evaluated model that is open already. Raises `ConfigError` for settings that exclude each other.
    """
    config, reference = models.config, models.config.reference
    if reference is None:
        return None
    _check(config, reference)
    if lm is not None or models.own.kind == "hf":
        if _is_itself(config, reference):
            return None
        mode: Mode = "answers"
    else:
        mode = mode_of(models, reference)
    return Comparer(models, mode, tasks, seeds)


def mode_of(models: Models, reference: ReferenceConfig) -> Mode:
    """The mode as written; "auto" is resident where both models fit in the free memory and neither speed nor memory is
    measured. Raises `ConfigError` for these measures of two resident models."""
    costs = [name for name in asked_costs(models.config) if name in (PEAK_MEMORY, TOKENS_PER_SECOND)]
    if reference.mode == "resident" and costs:
        raise ConfigError(f"'{costs[0]}' cannot be told with both models open: set 'reference.mode' to 'recorded'")
    if reference.mode != "auto":
        return reference.mode
    return "resident" if not costs and _fits(models.own, models.other) else "recorded"


def _check(config: EvaluationConfig, reference: ReferenceConfig) -> None:
    if reference.is_input_model:
        raise ConfigError(
            f"'reference' = '{INPUT_MODEL}' means the model that an Olive workflow started from: give a model's path"
        )
    if config.use_cache is not None:
        raise ConfigError(
            "'use_cache' cannot go with 'reference': answers of earlier runs come without distributions. What the "
            "reference says is kept by itself ('reference.records_dir')"
        )


def _is_itself(config: EvaluationConfig, reference: ReferenceConfig) -> bool:
    own, other = (Path(path) for path in (config.model.path, reference.path))
    return own == other or (own.exists() and other.exists() and own.samefile(other))


def _fits(*models: ResolvedModel) -> bool:
    """Whether the models fit in the host's free memory. Free memory of other devices is unknown, and so is the size of
    a model on the hub: such models take turns."""
    if not all(_is_on_host(model) for model in models):
        return False
    sizes = [model.size for model in models if model.size is not None]
    return len(sizes) == len(models) and MEMORY_FACTOR * sum(sizes) <= psutil.virtual_memory().available


def _is_on_host(model: ResolvedModel) -> bool:
    if model.kind == "onnx":
        return model.device.kind == "cpu"
    import torch

    device = model.settings.device
    return device == "cpu" or (device is None and not torch.cuda.is_available())
