"""Opens what a configuration names: our model on ONNX Runtime, or the Hugging Face baseline; says what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from olive_ext.config import EvaluationConfig
from olive_ext.errors import ModelError
from olive_ext.model import locate, model_kind, size_on_disk

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM

Kind = Literal["onnx", "hf"]

_HF_WEIGHTS = ("*.safetensors", "*.bin")


def kind_of(config: EvaluationConfig) -> Kind:
    """`model.kind`, else what `model_class` says, else what the files say. Raises `ModelError`."""
    if config.model.kind != "auto":
        return config.model.kind
    if config.model_class is not None:
        return "hf" if config.model_class == "hf" else "onnx"
    return model_kind(config.model.path)


def open_model(config: EvaluationConfig, progress: bool = False) -> LM:
    """The model, ready for lm-eval. Raises `ModelError`, `ProviderError` or `ConfigError`."""
    from olive_ext.backends.lm_eval_patches import quiet_bars

    is_onnx = kind_of(config) == "onnx"
    with quiet_bars(progress):
        return _open_onnx(config) if is_onnx else _open_hf(config)


def open_compared(config: EvaluationConfig, progress: bool = False, **arguments: Any) -> LM:
    """As `open_model`, for a model that is one of two; a Hugging Face model is run by this package, too.

    `arguments` are further ones of `OrtLM`.
    """
    from olive_ext.backends.lm_eval_patches import quiet_bars

    is_onnx = kind_of(config) == "onnx"
    own = {} if is_onnx else {"kind": "hf", "device": config.device}
    with quiet_bars(progress):
        return _open_onnx(config, **own, **arguments)


def context_length(config: EvaluationConfig) -> int | None:
    """The longest context of an ONNX model, from its files; None where these do not tell."""
    from olive_ext.graph.onnx_file import load_graph
    from olive_ext.model.decoder_spec import read_spec

    files = locate(config.model.path, config.model.onnx_file_name, config.tokenizer)
    try:
        return read_spec(
            load_graph(files.decoder), files.genai_config, config.max_length, files.hf_config
        ).context_length
    except ModelError:
        return None


def _open_onnx(config: EvaluationConfig, **more: Any) -> LM:
    from olive_ext.backends.lm_eval import OrtLM

    arguments = {
        "execution_provider": config.execution_provider,
        "provider_options": config.provider_options,
        "provider_libraries": config.provider_libraries,
        "allow_cpu_fallback": config.allow_cpu_fallback,
        "batch_size": config.batch_size,
        "max_length": config.max_length,
        "tokenizer": config.tokenizer,
        "onnx_file_name": config.model.onnx_file_name,
        "engine": config.engine,
        "seed": config.seed or 0,
    }
    return OrtLM(config.model.path, **{**arguments, **config.model_args, **more})


def _open_hf(config: EvaluationConfig) -> LM:
    from olive_ext.backends.hf import open_hf

    return open_hf(
        config.model.path,
        tokenizer=config.tokenizer,
        device=config.device,
        batch_size=config.batch_size,
        max_length=config.max_length,
        model_args=config.model_args,
    )


def size_in_bytes(config: EvaluationConfig, lm: LM | None) -> int:
    """Bytes of the model's files; of the parameters in memory where a Hugging Face model has no folder here."""
    if lm is None or not hasattr(lm, "model"):
        if kind_of(config) == "onnx":
            return size_on_disk(locate(config.model.path, config.model.onnx_file_name, config.tokenizer))
        lm = lm or _open_hf(config)
    files = hf_files(config.model.path)
    if files:
        return sum(file.stat().st_size for file in files)
    return sum(tensor.numel() * tensor.element_size() for tensor in lm.model.parameters())


def hf_files(path: str) -> list[Path]:
    """The weights in a Hugging Face model's folder; none where it is only known by name."""
    return [file for pattern in _HF_WEIGHTS for file in Path(path).glob(pattern)]


def answers_key(config: EvaluationConfig, lm: LM) -> str:
    """What the database of answers is keyed to: a digest of the model's content and of the settings that matter."""
    if hasattr(lm, "answers_key"):
        return str(lm.answers_key())
    from olive_ext.backends.hf import answers_key

    return answers_key(lm)


def execution_of(lm: LM) -> Mapping[str, Any]:
    """The session's facts; empty for a baseline."""
    session = getattr(lm, "session", None)
    facts: Mapping[str, Any] = session.describe_execution() if session is not None else {}
    return facts
