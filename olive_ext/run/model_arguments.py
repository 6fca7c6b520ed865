"""Settings that the class of the evaluated model decides, refused before anything runs. Knows no model."""

from __future__ import annotations

from olive_ext.config import EvaluationSettings
from olive_ext.errors import ConfigError


def refuse_arguments(settings: EvaluationSettings, where: str = "", *, is_onnx: bool = True) -> None:
    """Raises `ConfigError` for a `model_class` that does not run ONNX models, and for `model_args` that `OrtLM` does
    not take. `where` is the block's place in a recipe. Without `is_onnx` only a `model_class` that names this package's
    engine tells that the arguments are `OrtLM`'s; others are those of lm-eval's Hugging Face backend.
    """
    from olive_ext.backends.lm_eval.arguments import OrtLMArguments

    prefix = f"{where}." if where else ""
    if is_onnx and settings.model_class == "hf":
        raise ConfigError(f"'{prefix}model_class' = 'hf', but the model is an ONNX model: leave 'model_class' out")
    if is_onnx or settings.model_class not in (None, "hf"):
        OrtLMArguments.parse(settings.model_args, f"{prefix}model_args")


def is_onnx_model(kind: str) -> bool:
    """Whether an input model of Olive's type `kind` reaches the evaluation as ONNX graphs, whatever passes do."""
    return kind.lower() in ("onnxmodel", "compositemodel")
