"""Refuses tasks and settings that ask of a model what it does not take or cannot do, before it is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from olive_ext.config import EvaluationConfig
from olive_ext.errors import TaskError
from olive_ext.model import ResolvedModel
from olive_ext.model.media_types import Modality
from olive_ext.model.types import SourceKind

DEFAULT_LENGTH = 2048
"""Context where a model names none and no reference is open yet."""

if TYPE_CHECKING:
    from olive_ext.backends.task_inputs import TaskInputs


def refuse_generations(
    tasks: Iterable[TaskInputs], gen_kwargs: Mapping[str, Any], model: ResolvedModel | None = None
) -> None:
    """Raises `TaskError` for settings of a generation, a task's with the user's, that cannot be followed; where the
    `model` is known, for texts longer than its context as well."""
    from olive_ext.backends.lm_eval.generation_settings import check_numbers, refuse_generation

    check_numbers(gen_kwargs)
    for task in tasks:
        refuse_generation(task.task, task.config, gen_kwargs, None if model is None else model.context_length)


def refuse_texts(model: ResolvedModel, config: EvaluationConfig) -> None:
    """Raises `ConfigError` for a chat template that is asked for and not there or broken, and for an encoder-decoder
    none of whose configurations says what its decoder begins with; beside a reference, which is opened or even run
    before the model, for all that opening the model's tokenizer refuses."""
    is_ours = model.runtime[0] == "onnxruntime"
    source = model.source if is_ours else None
    if source is None and not config.apply_chat_template and config.reference is None:
        return
    from olive_ext.backends.lm_eval.arguments import OrtLMArguments
    from olive_ext.backends.lm_eval_run import chosen_template
    from olive_ext.session.opening import open_tokenizer
    from olive_ext.text.bounded_templates import refuse_template
    from olive_ext.text.encoder_decoder import read_encoding
    from olive_ext.text.generation_bounds import read_stop_ids

    if is_ours and model.context_length is None:  # it takes the reference's, which is not open yet
        model = model.patched({"max_length": DEFAULT_LENGTH})
    tokenizer = open_tokenizer(model)
    if is_ours:
        read_stop_ids(tokenizer, model.files)
    encoding = None if source is None else read_encoding(tokenizer, model, source)
    if encoding is not None:
        encoding.begin()
    if config.apply_chat_template:
        with chosen_template(tokenizer.hf, config.apply_chat_template):
            refuse_template(tokenizer, **OrtLMArguments.parse(config.model_args, "model_args").template_variables())


def refuse_misfits(model: ResolvedModel, tasks: Iterable[TaskInputs]) -> None:
    """Raises `TaskError` for a task whose requests the model would refuse: pictures or sound that it does not take, no
    sound for a model of speech, whole texts for an encoder-decoder. It is not known of what onnxruntime-genai runs.
    """
    if model.runtime[0] == "genai":
        return
    source = model.source
    is_speech = source is not None and source[0] is SourceKind.FEATURES
    taken = () if model.media is None else model.media.modalities
    for task in tasks:
        if task.gives_images and Modality.IMAGE not in taken:
            raise TaskError(f"task '{task.task}' gives pictures, which this model does not take")
        if task.gives_audio and not is_speech and Modality.AUDIO not in taken:
            raise TaskError(f"task '{task.task}' gives sound, which this model does not take")
        if is_speech and not task.gives_audio:
            raise TaskError(f"task '{task.task}' gives no sound ('doc_to_audio'), and this model takes nothing else")
        if task.is_rolling and source is not None:
            raise TaskError(f"task '{task.task}' scores whole texts: an encoder-decoder has no likelihood of these")
