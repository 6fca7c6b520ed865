"""Chooses how a configuration's reference is run: both models resident, or one after the other. Opens nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from olive_ext.config import INPUT_MODEL, EvaluationConfig, ReferenceConfig
from olive_ext.errors import ConfigError
from olive_ext.model import locate, register_libraries, resolve_providers, size_on_disk
from olive_ext.run.costs import PEAK_MEMORY, TOKENS_PER_SECOND, asked_costs
from olive_ext.run.opening import hf_files, kind_of
from olive_ext.run.reference.comparison_run import Comparer, Mode
from olive_ext.run.reference.models import reference_config

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks, Seeds

MEMORY_FACTOR = 2.0
"""Memory that a model is expected to take, over its size on disk: weights, unpacked ones, KV cache and logits."""


def comparer_of(
    config: EvaluationConfig, lm: LM | None, tasks: LoadedTasks, seeds: Seeds, progress: bool
) -> Comparer | None:
    """The comparer with `config.reference`; None without one, or where it is the evaluated lm-eval model itself.

    `lm` is an evaluated model that is open already. Raises `ConfigError` for settings that exclude each other.
    """
    reference = config.reference
    if reference is None:
        return None
    _check(config, reference)
    if lm is not None or kind_of(config) == "hf":
        return None if _is_itself(config, reference) else Comparer(config, "answers", tasks, seeds, progress)
    return Comparer(config, mode_of(config, reference), tasks, seeds, progress)


def mode_of(config: EvaluationConfig, reference: ReferenceConfig) -> Mode:
    """The mode as written; "auto" is resident where both models fit in the free memory and neither speed nor memory is
    measured. Raises `ConfigError` for these measures of two resident models."""
    costs = [name for name in asked_costs(config) if name in (PEAK_MEMORY, TOKENS_PER_SECOND)]
    if reference.mode == "resident" and costs:
        raise ConfigError(f"'{costs[0]}' cannot be told with both models open: set 'reference.mode' to 'recorded'")
    if reference.mode != "auto":
        return reference.mode
    return "resident" if not costs and _fits(config) else "recorded"


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


def _fits(config: EvaluationConfig) -> bool:
    """Whether both models fit in the host's free memory. Free memory of other devices is unknown: models there take
    turns."""
    both = config, reference_config(config)
    if not all(_is_on_host(each) for each in both):
        return False
    needed = [size for each in both if (size := _size(each)) is not None]
    return len(needed) == 2 and MEMORY_FACTOR * sum(needed) <= psutil.virtual_memory().available


def _is_on_host(config: EvaluationConfig) -> bool:
    if kind_of(config) == "hf":
        import torch

        return config.device == "cpu" or (config.device is None and not torch.cuda.is_available())
    files = locate(config.model.path, config.model.onnx_file_name, config.tokenizer)
    register_libraries(config.provider_libraries)
    providers = resolve_providers(
        config.execution_provider,
        config.provider_options,
        genai_config=files.genai_config,
        allow_cpu_fallback=config.allow_cpu_fallback,
    )
    return providers[0].device == "cpu"


def _size(config: EvaluationConfig) -> int | None:
    """Bytes on disk; None for a model that is not downloaded yet."""
    if kind_of(config) == "onnx":
        return size_on_disk(locate(config.model.path, config.model.onnx_file_name, config.tokenizer))
    return sum(file.stat().st_size for file in hf_files(config.model.path)) or None
