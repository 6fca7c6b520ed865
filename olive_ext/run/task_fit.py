"""Refuses tasks and settings that ask for what the model, or its class, does not take, before it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from olive_ext.config import EvaluationConfig, EvaluationSettings
from olive_ext.errors import UnfitTaskError, warn_ignored
from olive_ext.model import ResolvedModel
from olive_ext.model.types import Modality, SourceKind

DEFAULT_LENGTH = 2048
"""The context length where a model names none and no reference is open yet."""


def with_length(model: ResolvedModel) -> ResolvedModel:
    """The model, whose graph cannot be read without a context length, with one where no file of it names any."""
    return model if model.context_length is not None else model.patched({"max_length": DEFAULT_LENGTH})


def refuse_texts(model: ResolvedModel, config: EvaluationConfig) -> None:
    """Raises `ConfigError` for a chat template that is asked for and not there or broken, and for an encoder-decoder
    none of whose configurations says what its decoder begins with; beside a reference, which is opened or even run
    before the model, for all that opening the model's tokenizer refuses."""
    is_ours = model.runtime.runs_graph
    source = model.source if is_ours else None
    if source is None and not config.apply_chat_template and config.reference is None:
        return
    from olive_ext.backends.lm_eval.arguments import OrtLMArguments
    from olive_ext.session.local import open_tokenizer, read_texts
    from olive_ext.session.tokenizer_fit import chosen_template, refuse_template

    model = with_length(model) if is_ours else model
    tokenizer = open_tokenizer(model)
    encoding = read_texts(model, tokenizer).encoding if is_ours else None
    if encoding is not None:
        encoding.begin()
    if config.apply_chat_template:
        with chosen_template(tokenizer.hf, config.apply_chat_template):
            refuse_template(tokenizer, **OrtLMArguments.parse(config.model_args, "model_args").template_variables())


def refuse_misfits(model: ResolvedModel, tasks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `TaskError` for a task, by name with its configuration, whose requests the model would refuse: pictures or
    sound that it does not take, no sound for a model of speech, whole texts for an encoder-decoder. Where another
    library runs the graphs of an ONNX package, it takes text alone."""
    is_ours = model.kind == "hf" or model.runtime.runs_graph
    who = "this model" if is_ours else f"'engine.runtime' = '{model.runtime.name}'"
    source = model.source
    is_speech = source is not None and source[0] is SourceKind.FEATURES
    taken = () if model.media is None else model.media.modalities
    hears = is_speech or Modality.AUDIO in taken
    media = {"doc_to_image": ("pictures", Modality.IMAGE in taken), "doc_to_audio": ("sound", hears)}
    for name, config in tasks.items():
        for key, (what, is_taken) in media.items():
            if config.get(key) is not None and not is_taken:
                raise UnfitTaskError(f"task '{name}' gives {what}, which {who} does not take")
        if is_speech and config.get("doc_to_audio") is None:
            raise UnfitTaskError(f"task '{name}' gives no sound ('doc_to_audio'); this model takes only sound")
        if config.get("output_type") == "loglikelihood_rolling" and source is not None:
            raise UnfitTaskError(f"task '{name}' scores whole texts; an encoder-decoder cannot")


def refuse_arguments(settings: EvaluationSettings, where: str = "", *, is_onnx: bool = True) -> None:
    """Raises `ConfigError` for `model_args` that `OrtLM` does not take. `where` is the block's place in a recipe.
    Without `is_onnx` only a `model_class` that names this package's engine shows that the arguments are `OrtLM`'s;
    others are those of lm-eval's Hugging Face backend. An ONNX model runs on this engine whatever `model_class` says: a
    recipe that is ported keeps "hf" beside the checkpoint that its passes convert.
    """
    from olive_ext.backends.lm_eval.arguments import OrtLMArguments

    prefix = f"{where}." if where else ""
    if is_onnx and settings.model_class == "hf":
        warn_ignored("'model_class' = 'hf', because the model is an ONNX model")
    if is_onnx or settings.model_class not in (None, "hf"):
        OrtLMArguments.parse(settings.model_args, f"{prefix}model_args")
