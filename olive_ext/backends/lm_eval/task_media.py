"""Pictures and sounds of lm-eval's requests: which the model is given, and where its prompts and messages hold them.

Follows lm-eval's hf-multimodal in the meaning of "<image>" and of its arguments. Knows no engine.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.models.utils import replace_placeholders, resize_image

from olive_ext.backends.lm_eval.arguments import OrtLMArguments
from olive_ext.backends.lm_eval_patches import as_list
from olive_ext.errors import MediaError, TaskError, UnfitTaskError, counted
from olive_ext.media.pictures import read_picture
from olive_ext.model.spec.media_types import Modality
from olive_ext.session import Session

PLACEHOLDERS = {Modality.IMAGE: "<image>", Modality.AUDIO: "<audio>"}
"""What a task's text holds for a picture and for a sound."""

_ARGUMENTS = {"visual": Modality.IMAGE, "audio": Modality.AUDIO}
"""Names under which a request of lm-eval gives them."""


class TaskMedia:
    """The pictures and sounds of requests for the model of one session."""

    def __init__(self, arguments: OrtLMArguments, session: Session) -> None:
        self._arguments = arguments
        self._media = session.media
        self._markers = {} if self._media is None else self._media.markers
        self._marked: dict[str, int] = {}
        """Pictures that stood in the conversation of a prompt, where these are more than the model is given."""

        self.is_speech = session.encoding is not None and session.encoding.sound is not None
        """Whether every request has a sound, and its context is what the decoder begins with."""

        self.is_taken = bool(self._markers) or self.is_speech
        """Whether the model takes anything besides text."""

    def given(self, args: Sequence[Any]) -> dict[str, Any]:
        """What a request gives besides its texts, by the name of the session's field for it. Raises `TaskError` for
        what the model does not take, and where it takes sound and the task has none."""
        media = args[2] if len(args) > 2 else {}
        taken = {name for name, modality in _ARGUMENTS.items() if modality in self._markers}
        if unknown := media.keys() - (taken | {"audio"} if self.is_speech else taken):
            raise UnfitTaskError(f"the task gives {', '.join(sorted(unknown))}, which this model does not take")
        if self.is_speech and "audio" not in media:
            raise UnfitTaskError("the task gives text only; the encoder of this model takes sound ('doc_to_audio')")
        fields = {"images": self._images(media.get("visual")), "audio": as_list(media.get("audio"))}
        return {name: tuple(items) for name, items in fields.items() if items}

    def _images(self, given: Any) -> list[Any]:
        """The pictures, as many and as large as the arguments allow."""
        images = as_list(given)
        sizes = self._arguments.image_width, self._arguments.image_height, self._arguments.image_max_side
        if any(sizes):
            images = [_resized(image, sizes) for image in images]
        return images[: self._arguments.max_images]

    def prompt(self, args: Sequence[Any]) -> str:
        """The context of a request, with the model's marker for each picture and sound that it is given. (Where a chat
        template has been applied, that is so already.)"""
        context = str(args[0])
        if len(args) < 3 or self._media is None:
            return context
        self._refuse_others(context, len(as_list(args[2].get("visual"))))
        for modality in self._markers:
            given = self._arguments.image_string if modality is Modality.IMAGE else None
            marker = given or self._media.marker_text(modality)
            context = str(replace_placeholders(context, PLACEHOLDERS[modality], marker, self._most(modality)))
        return context

    def _refuse_others(self, context: str, num_images: int) -> None:
        """Raises `TaskError` where pictures are missing that the task's text has a place for: `max_images` would put
        others there."""
        mark = PLACEHOLDERS[Modality.IMAGE]
        marks = self._marked.get(context, context.count(mark))
        if marks > max(num_images, self._arguments.max_images):
            raise TaskError(
                f"the task's text has {marks} of '{mark}', and its request gives {counted(num_images, 'picture')}: "
                "those of examples are given by 'olive-ext evaluate' and Olive workflows, not by lm-eval itself"
            )

    def note_markers(self, text: str, history: Sequence[Mapping[str, Any]]) -> None:
        """Remembers how many pictures the conversation of the prompt `text` has a place for."""
        marks = sum(str(message["content"]).count(PLACEHOLDERS[Modality.IMAGE]) for message in history)
        if marks > self._arguments.max_images:
            self._marked[text] = marks

    def messages(self, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with a part for each "<image>" and "<audio>" of a message: all in front of its text, or
        where they stand with `interleave`."""
        return [self._message(message) for message in history]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        text = message["content"]
        kinds = {PLACEHOLDERS[modality]: modality for modality in self._markers}
        if not isinstance(text, str) or not any(mark in text for mark in kinds):
            return dict(message)
        seen: Counter[Modality] = Counter()
        parts: list[dict[str, Any]] = []
        for piece in filter(None, re.split(f"({'|'.join(kinds)})", text)):
            modality = kinds.get(piece)
            if modality is None:
                parts.append(_text(piece))
            elif seen[modality] < self._most(modality):
                seen[modality] += 1
                parts.append({"type": modality.value})
        if not self._arguments.interleave:
            whole = "".join(part.get("text", "") for part in parts)
            parts = [*(part for part in parts if part["type"] != "text"), _text(whole)]
        return {**message, "content": parts}

    def _most(self, modality: Modality) -> int:
        """Items of a request that the model is given."""
        return self._arguments.max_images if modality is Modality.IMAGE else sys.maxsize


def _resized(given: Any, sizes: tuple[int | None, ...]) -> Any:
    """The picture as large as `sizes` (width, height, larger side) allow. One that cannot be read stays as it is: the
    session says which request it costs."""
    try:
        return resize_image(read_picture(given), *sizes)
    except MediaError:
        return given


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
