"""Pictures and sounds of lm-eval's requests: which the model is given, and where its prompts and messages hold them.

Follows lm-eval's hf-multimodal in the meaning of "<image>" and of its arguments. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.models.utils import replace_placeholders, resize_image

from olive_ext.backends.lm_eval.arguments import OrtLMArguments
from olive_ext.errors import MediaError, TaskError
from olive_ext.media.pictures import read_picture
from olive_ext.model.media_types import Modality
from olive_ext.session import Session

PLACEHOLDER = "<image>"
"""What a task's text holds for a picture."""


class TaskMedia:
    """The pictures and sounds of requests for the model of one session."""

    def __init__(self, arguments: OrtLMArguments, session: Session) -> None:
        self._arguments = arguments
        self._media = session.media
        self._takes_images = self._media is not None and Modality.IMAGE in self._media.markers
        self.takes_sound = session.encoding is not None and session.encoding.sound is not None
        """Whether requests have a sound, and their contexts are what the decoder begins with."""

    @property
    def is_taken(self) -> bool:
        """Whether the model takes anything besides text."""
        return self._takes_images or self.takes_sound

    def given(self, args: Sequence[Any]) -> dict[str, Any]:
        """What a request gives besides its texts, by the name of the session's field for it. Raises `TaskError` for
        what the model does not take, and where it takes sound and the task has none."""
        found = args[2] if len(args) > 2 else {}
        taken = {"audio"} if self.takes_sound else {"visual"} if self._takes_images else set()
        if unknown := found.keys() - taken:
            raise TaskError(f"the task gives {', '.join(sorted(unknown))}, which this model does not take")
        if self.takes_sound and "audio" not in found:
            raise TaskError("the task gives text only; the encoder of this model takes sound ('doc_to_audio')")
        fields = {"images": self._images(found.get("visual")), "audio": _as_list(found.get("audio"))}
        return {name: tuple(items) for name, items in fields.items() if items}

    def _images(self, given: Any) -> list[Any]:
        """The pictures, as many and as large as the arguments allow."""
        images = _as_list(given)
        sizes = self._arguments.image_width, self._arguments.image_height, self._arguments.image_max_side
        if any(sizes):
            images = [_resized(image, sizes) for image in images]
        return images[: self._arguments.max_images]

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
        if not self._takes_images or not isinstance(text, str) or PLACEHOLDER not in text:
            return dict(message)
        texts, image = text.split(PLACEHOLDER), {"type": "image"}
        num_images = min(len(texts) - 1, self._arguments.max_images)
        if not self._arguments.interleave:
            return {**message, "content": [image] * num_images + [_text("".join(texts))]}
        parts: list[dict[str, Any]] = []
        for place, part in enumerate(texts):
            parts += [_text(part)] * bool(part) + [image] * (place < num_images)
        return {**message, "content": parts}


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _resized(given: Any, sizes: tuple[int | None, ...]) -> Any:
    """The picture as large as `sizes` (width, height, larger side) allow. One that cannot be read stays as it is: the
    session says which request it costs."""
    try:
        return resize_image(read_picture(given), *sizes)
    except MediaError:
        return given


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
