"""Refuses tasks that ask of a model what it does not take, before it is opened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from olive_ext.errors import TaskError
from olive_ext.model import ResolvedModel
from olive_ext.model.media_types import Modality
from olive_ext.model.types import SourceKind

if TYPE_CHECKING:
    from olive_ext.backends.task_inputs import TaskInputs


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
