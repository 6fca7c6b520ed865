"""Which model of a comparison runs when, as `Mode` names it (`run.reference.comparison_run` says what each does)."""

from __future__ import annotations

from typing import Literal

import psutil

from olive_ext.config import ReferenceConfig
from olive_ext.errors import ConfigError
from olive_ext.model import ResolvedModel
from olive_ext.run.costs import PEAK_MEMORY, TOKENS_PER_SECOND, asked_costs
from olive_ext.run.models import Models

Mode = Literal["recorded", "resident", "answers", "recording", "file"]

MEMORY_FACTOR = 2.0
"""Memory that a model is expected to take, over its size on disk: weights, unpacked ones, KV cache and logits."""


def mode_of(models: Models, reference: ReferenceConfig) -> Mode:
    """The mode as written; "auto" is resident where both models fit in the free memory and neither speed nor memory is
    measured. Raises `ConfigError` for these measures of two resident models."""
    if models.records_file is not None:
        return "file"
    costs = [name for name in asked_costs(models.config) if name in (PEAK_MEMORY, TOKENS_PER_SECOND)]
    if reference.mode == "resident" and costs:
        raise ConfigError(f"'{costs[0]}' cannot be told with both models open: set 'reference.mode' to 'recorded'")
    if reference.mode != "auto" or reference.is_same:
        return "resident" if reference.mode == "auto" else reference.mode
    return "resident" if not costs and _fits(models.own, models.other) else "recorded"


def _fits(*models: ResolvedModel) -> bool:
    """Whether the models fit in the host's free memory. Free memory of other devices is unknown, and so is the size of
    a model on the hub: such models take turns."""
    if not all(model.runtime.is_on_host(model) for model in models):
        return False
    sizes = [model.size for model in models if model.size is not None]
    return len(sizes) == len(models) and MEMORY_FACTOR * sum(sizes) <= psutil.virtual_memory().available
