"""Pictures of lm-eval's requests: which the model is given, where its prompts hold them, and chat messages with parts.

Follows lm-eval's hf-multimodal in the meaning of "<image>" and of its arguments. Knows no session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.models.utils import replace_placeholders, resize_image

from olive_ext.backends.lm_eval.arguments import OrtLMArguments
from olive_ext.errors import TaskError
from olive_ext.model.media_types import Modality
from olive_ext.text.placeholders import MediaText

PLACEHOLDER = "<image>"
"""What a task's text holds for a picture."""


class TaskMedia:
    """The pictures of requests for one model; a `media` of None is that of a model without encoders."""

    def __init__(self, arguments: OrtLMArguments, media: MediaText | None) -> None:
        self._arguments = arguments
        self._media = media

    @property
    def is_taken(self) -> bool:
        """Whether the model takes pictures."""
        return self._media is not None and Modality.IMAGE in self._media.markers

    def images(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The pictures of a request: those behind its texts, as many and as large as the arguments allow."""
        given = args[2] if len(args) > 2 else {}
        if unknown := given.keys() - {"visual"}:
            raise TaskError(f"the task gives {', '.join(sorted(unknown))}, which this model does not take")
        images = given.get("visual") or ()
        images = images if isinstance(images, (list, tuple)) else [images]
        sizes = self._arguments.image_width, self._arguments.image_height, self._arguments.image_max_side
        if any(sizes):
            images = [resize_image(image, *sizes) for image in images]
        return tuple(images[: self._arguments.max_images])

    def prompt(self, args: Sequence[Any]) -> str:
        """The context of a request, with the model's marker for each picture that it is given. (Where a chat template
        has been applied, that is so already.)"""
        context = str(args[0])
        if len(args) < 3 or PLACEHOLDER not in context or self._media is None:
            return context
        marker = self._arguments.image_string or self._media.marker_text(Modality.IMAGE)
        return str(replace_placeholders(context, PLACEHOLDER, marker, self._arguments.max_images))

    def messages(self, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with a part for each "<image>" of a message: all in front of its text, or where they stand
        with `interleave`."""
        return [self._message(message) for message in history]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        text = message["content"]
        if not self.is_taken or not isinstance(text, str) or PLACEHOLDER not in text:
            return dict(message)
        texts, image = text.split(PLACEHOLDER), {"type": "image"}
        num_images = min(len(texts) - 1, self._arguments.max_images)
        if not self._arguments.interleave:
            return {**message, "content": [image] * num_images + [_text("".join(texts))]}
        parts: list[dict[str, Any]] = []
        for place, part in enumerate(texts):
            parts += [_text(part)] * bool(part) + [image] * (place < num_images)
        return {**message, "content": parts}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
