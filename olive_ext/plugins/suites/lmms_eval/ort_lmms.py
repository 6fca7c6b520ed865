"""lmms-eval's requests on an `OrtLM`: `OrtChat` for what it asks as messages, `OrtSimple` for texts and choices.

lmms-eval knows which document holds which picture; prompts, settings and answers are `OrtLM`'s. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance as TextInstance
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.errors import TaskError, UnfitTaskError
from olive_ext.session.requests import GenerationOutput

_OF_OTHERS = ("image_aspect_ratio", "modality")
"""Generation settings that tasks give for one model's image processor; the package's own has no such choice."""

_SOUNDS = (".wav", ".mp3", ".m4a", ".aac", ".flac", ".ogg", ".opus")
"""Endings of files that lmms-eval may give as a visual without saying that they are sounds; only WAV can be read."""

_MEDIA = {"image": "visual", "audio": "audio"}
"""`OrtLM`'s names of a request's pictures and sounds, by the type of a message's part."""

Messages = Sequence[Mapping[str, Any]]


class _OrtLMMS(lmms):  # type: ignore[misc] # lmms-eval has no types
    """A model for `lmms_eval.evaluator.simple_evaluate(model=...)`; the arguments are those of `OrtLM`.

    Raises `ConfigError` for arguments that `OrtLM` refuses, `TaskError` for documents that the model cannot be asked.
    """

    def __init__(self, pretrained: str | None = None, **arguments: Any) -> None:
        super().__init__()
        self._lm = OrtLM(pretrained, observer=self._count, **arguments)
        self._num_tokens: dict[int, int] = {}

    @property
    def session(self) -> Any:
        """The open session; `SessionError` once the model is closed."""
        return self._lm.session

    def clean(self) -> None:
        """Releases the model: lmms-eval calls it after the last request."""
        self._lm.close()

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """An answer to each request, cut before the first of its stop texts, with the number of its tokens."""
        self._num_tokens.clear()
        answers = self._lm.generate_until(self._instances("generate_until", requests, self._generation))
        return [
            GenerationResult(text, TokenCounts(output_tokens=self._num_tokens.get(place)))
            for place, text in enumerate(answers)
        ]

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """(log-probability in nats, is greedy) of each continuation after its document's pictures and text."""
        return self._lm.loglikelihood(self._instances("loglikelihood", requests, self._choice))

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        """Raises `TaskError`: only tasks of one round, whose prompt is known beforehand, can be batched."""
        names = sorted({str(request.task_name) for request in requests})
        raise TaskError(f"tasks {names} ask in several rounds ('generate_until_multi_round'), which olive_ext does not")

    def _generation(self, request: Instance) -> tuple[Messages, Mapping[str, Any]]:
        raise NotImplementedError

    def _choice(self, request: Instance) -> tuple[Messages, str]:
        raise NotImplementedError

    def _document(self, request: Instance) -> Any:
        *_, doc_id, task, split = request.args
        return self.task_dict[task][split][doc_id]

    def _instances(
        self, kind: str, requests: Sequence[Instance], read: Callable[[Instance], tuple[Messages, Any]]
    ) -> list[TextInstance]:
        """The requests of `OrtLM`; `read` gives one's messages, and its generation settings or its continuation."""
        instances = []
        for place, request in enumerate(requests):
            messages, second = read(request)
            if isinstance(second, Mapping):
                second = {name: value for name, value in second.items() if name not in _OF_OTHERS}
            whose = str(request.args[-2]) if len(request.args) > 2 else str(request.task_name)
            media: dict[str, list[Any]] = {"visual": [], "audio": []}
            try:
                conversation = [_opened(message, media) for message in messages]
            except TaskError as error:
                raise error.inside(f"task '{whose}', document {request.doc_id}") from error
            asked = self._context(conversation), second, {name: items for name, items in media.items() if items}
            instances.append(TextInstance(kind, {}, asked, place, metadata=(whose, request.doc_id, 1)))
        return instances

    def _context(self, conversation: Messages) -> str:
        """The prompt: by the chat template where there is one. A model of speech gets no text: its answer would begin
        with it."""
        encoding = self._lm.session.encoding
        if encoding is not None and encoding.sound is not None:
            return ""
        if self._lm.tokenizer.chat_template:
            return self._lm.apply_chat_template([dict(message) for message in conversation])
        parts = [part for message in conversation for part in message["content"]]
        return "".join(part.get("text", f"<{part['type']}>") for part in parts)

    def _count(self, instance: Any, request: object, output: object) -> None:
        if isinstance(output, GenerationOutput):
            self._num_tokens[instance.idx] = len(output.tokens)


class OrtChat(_OrtLMMS):
    """Tasks as messages (`doc_to_messages`), pictures where they stand: what `--model olive_ext` is."""

    is_simple = False

    def _generation(self, request: Instance) -> tuple[Messages, Mapping[str, Any]]:
        _, to_messages, settings, *_ = request.args
        return to_messages(self._document(request)), settings

    def _choice(self, request: Instance) -> tuple[Messages, str]:
        raise TaskError(f"task '{request.task_name}' scores choices, which lmms-eval asks with --force_simple only")


class OrtSimple(_OrtLMMS):
    """Tasks as a text after their pictures (`doc_to_visual`), with `--force_simple`; choices are scored."""

    is_simple = True

    def _generation(self, request: Instance) -> tuple[Messages, Mapping[str, Any]]:
        context, settings, to_visuals, *_ = request.args
        return self._turn(context, to_visuals(self._document(request))), settings

    def _choice(self, request: Instance) -> tuple[Messages, str]:
        context, target, *rest = request.args
        if not rest:  # a choice alone, for "acc_mutual_info"
            return self._turn(context, ()), target
        document = self._document(request)
        return self._turn(context, rest[0](document)), target(document) if callable(target) else target

    def _turn(self, context: str, visuals: Iterable[Any] | None) -> Messages:
        parts = [{"type": _kind(visual), "url": visual} for visual in visuals or ()]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": context}]}]


def _opened(message: Mapping[str, Any], media: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The message with an empty part for each picture and sound, which are appended to `media`. Raises `TaskError`."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text":
            parts.append({"type": "text", "text": part["text"]})
            continue
        kind = "audio" if _kind(part["url"]) == "audio" else part["type"]
        if kind not in _MEDIA:
            raise UnfitTaskError(f"a part of its messages is of type '{kind}': text, image and audio are accepted")
        item = part["url"]
        if hasattr(item, "get_all_samples"):  # what a decoder of datasets' `Audio` columns decodes
            decoded = item.get_all_samples()
            item = {"array": np.asarray(decoded.data), "sampling_rate": decoded.sample_rate}
        media[_MEDIA[kind]].append(item)
        parts.append({"type": kind})
    return {**message, "content": parts}


def _kind(visual: Any) -> str:
    """The kind of a visual, by itself: lmms-eval calls a mapping without a type a video, samples of sound as well."""
    if hasattr(visual, "get_all_samples"):
        return "audio"
    if isinstance(visual, Mapping):
        return "audio" if "array" in visual else str(visual.get("type", "video"))
    is_file = isinstance(visual, str | Path)
    if is_file and Path(visual).suffix.lower() in _SOUNDS:
        return "audio"
    is_video = is_file and Path(visual).suffix.lower() in (".mp4", ".avi", ".mov", ".mkv", ".webm")
    return "video" if is_video else "image"
