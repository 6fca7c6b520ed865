"""Opens a resolved model for lm-eval: this package's engine, or the Hugging Face baseline. Knows no files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from olive_ext.config import EvaluationConfig
from olive_ext.model import ResolvedModel, resolve

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM


def resolve_candidate(config: EvaluationConfig) -> ResolvedModel:
    """The evaluated model. What `model_args` say of opening an ONNX model counts; a baseline's are HFLM's own."""
    model = resolve(config.opening())
    if model.kind == "hf" or not config.model_args:
        return model
    from olive_ext.backends.lm_eval.arguments import OrtLMArguments

    return model.patched(OrtLMArguments.parse(config.model_args, where="OrtLM").opening())


def open_model(model: ResolvedModel, config: EvaluationConfig, progress: bool = False) -> LM:
    """The model, ready for lm-eval. Raises `ModelError`, `ProviderError` or `ConfigError`."""
    if model.kind == "onnx":
        return open_compared(model, config, progress)
    from olive_ext.backends.lm_eval_patches import quiet_bars

    with quiet_bars(progress):
        return _open_baseline(model, config.model_args)


def open_compared(model: ResolvedModel, config: EvaluationConfig, progress: bool = False, **more: Any) -> LM:
    """As `open_model`, for a model that is one of two; a Hugging Face model, too, is run by this package.

    `more` are further arguments of `OrtLM`.
    """
    from olive_ext.backends.lm_eval import OrtLM
    from olive_ext.backends.lm_eval_patches import quiet_bars

    with quiet_bars(progress):
        return OrtLM(model, **{"seed": config.seed or 0, **config.model_args, **more})


def _open_baseline(model: ResolvedModel, model_args: dict[str, Any]) -> LM:
    from olive_ext.backends.hf import open_hf

    settings = model.settings
    return open_hf(
        settings.model,
        tokenizer=settings.tokenizer,
        device=settings.device,
        batch_size=settings.batch_size,
        max_length=settings.max_length,
        model_args=model_args,
    )


def size_in_bytes(model: ResolvedModel, lm: LM | None, config: EvaluationConfig) -> int:
    """Bytes of the model's files; of the parameters in memory where a Hugging Face model has no folder here."""
    if model.size is not None:
        return model.size
    opened = lm or _open_baseline(model, config.model_args)
    return sum(tensor.numel() * tensor.element_size() for tensor in opened.model.parameters())


def answers_key(lm: LM) -> str:
    """What the database of answers is keyed to: a digest of the model's content and of the settings that matter."""
    if hasattr(lm, "answers_key"):
        return str(lm.answers_key())
    from olive_ext.backends.hf import answers_key

    return answers_key(lm)
