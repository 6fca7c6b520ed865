"""Pictures and sounds in a prompt, where each has one marker that is replaced by its placeholders; and requests to an
encoder-decoder: its encoder's input, and the tokens with which its decoder begins.

Knows no pixels and no samples. A run of placeholders is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from olive_ext.errors import (
    ConfigError,
    MediaError,
    MissingError,
    ModelError,
    TaskError,
    UnfitTaskError,
    UnsupportedError,
    counted,
)
from olive_ext.media.items import ItemLimit, Media, MediaRun, Source, moved
from olive_ext.media.pictures import data_of_url, decoded
from olive_ext.media.processor import MediaProcessor, SoundProcessor
from olive_ext.model import ResolvedModel
from olive_ext.model.files.package_config import Suppressed, read_suppressed
from olive_ext.model.types import MediaInput, Modality, ModelFiles, SourceKind
from olive_ext.session.generation_bounds import read_start
from olive_ext.session.requests import GenerationRequest, Prompt, ScoringRequest, is_chat
from olive_ext.session.tokenizer import Tokenizer, refuse_named


@dataclass(frozen=True)
class Marker:
    """The token that marks an item in a prompt, and the tokens around the placeholders that replace it."""

    token: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class MediaText:
    """Puts pictures and sounds into prompts for one model."""

    processor: MediaProcessor
    markers: Mapping[Modality, Marker]
    tokenizer: Tokenizer
    limit: ItemLimit = field(default_factory=ItemLimit)
    problems: Mapping[Modality, str] = field(default_factory=dict)
    """Why a modality has no marker. Text runs without one."""

    def marker_text(self, modality: Modality) -> str:
        """The text of the token that stands for an item in a prompt."""
        return self.tokenizer.decode([self.markers[modality].token], skip_special_tokens=False)

    def insert_items(
        self, tokens: Sequence[int], images: Sequence[Any], audio: Sequence[Any] = ()
    ) -> tuple[Sequence[int], Media]:
        """The prompt's tokens with each picture's and sound's placeholders in place of its marker, and where they are.

        Raises `MediaError` for one that cannot be read or has too many tokens, and where there are not as many markers
        as are given; `TaskError` where the model takes none.
        """
        media = {Modality.IMAGE: images, Modality.AUDIO: audio}
        for modality, items in media.items():
            if items and modality not in self.markers:
                problem = self.problems.get(modality, self.processor.spec.problem)
                given_items, why = counted(len(items), modality.kind), f": {problem}" if problem else ""
                raise UnfitTaskError(f"the request gives {given_items}; this model takes none{why}")
        markers = {marker.token: modality for modality, marker in self.markers.items()}
        if not any(media.values()) and markers.keys().isdisjoint(tokens):
            self.refuse_placeholders(tokens)
            return tokens, ()
        self.refuse_placeholders(token for token in tokens if token not in markers)
        for token, modality in markers.items():
            if (num_markers := tokens.count(token)) != len(media[modality]):
                kind = modality.kind
                raise MediaError(
                    f"the request gives {counted(len(media[modality]), kind)}, and its prompt has {num_markers} of the "
                    f"marker '{self.marker_text(modality)}': give one for each {kind}"
                )
        waiting = {modality: iter(items) for modality, items in media.items()}
        placed: list[int] = []
        runs: list[MediaRun] = []
        for token in tokens:
            if token not in markers:
                placed.append(token)
                continue
            modality = markers[token]
            marker, item = self.markers[modality], self.processor.item(modality, next(waiting[modality]))
            self.limit.check(item)
            runs.append(MediaRun(len(placed) + len(marker.before), item))
            placed += [*marker.before, *[item.placeholder] * item.num_tokens, *marker.after]
        return placed, tuple(runs)

    @cached_property
    def placeholders(self) -> Mapping[int, Modality]:
        """The modality of each placeholder token, which features replace."""
        return {taken.placeholder: taken.modality for taken in self.processor.spec.inputs}

    def refuse_placeholders(self, text: Iterable[int]) -> None:
        """Raises `MediaError` where a text has placeholder tokens. An embedding graph replaces them by features or by
        nothing, so that the text would get other numbers."""
        for token in self.placeholders.keys() & set(text):
            raise MediaError(
                f"a text holds '{self.tokenizer.decode([token], skip_special_tokens=False)}' (token {token}), in whose "
                f"place this model reads a {self.placeholders[token].kind}: it cannot be read as text"
            )


def read_markers(processor: MediaProcessor, files: ModelFiles, tokenizer: Tokenizer, limit: ItemLimit) -> MediaText:
    """The markers of a model: its placeholder tokens, but for Gemma 3 its begin-of-image token. Gemma's begin and end
    tokens stand around its placeholders (transformers' Gemma3Processor and Gemma4Processor). Raises `ConfigError` where
    `limit` is strict and allows no item."""
    processor.check_fixed(limit)
    made = {taken.modality: _marker(taken, files, tokenizer) for taken in processor.spec.inputs}
    markers = {modality: marker for modality, marker in made.items() if isinstance(marker, Marker)}
    problems = {modality: problem for modality, problem in made.items() if isinstance(problem, str)}
    return MediaText(processor, markers, tokenizer, limit, problems)


def _marker(taken: MediaInput, files: ModelFiles, tokenizer: Tokenizer) -> Marker | str:
    """The marker, or why there is none."""
    kind = str(files.genai_config.get("model", {}).get("type") or files.hf_config.get("model_type") or "")
    if not kind.startswith("gemma"):
        return Marker(taken.placeholder)
    try:
        begin, end = (_named_id(name, files, tokenizer) for name in _AROUND[taken.modality])
    except ModelError as error:
        return str(error)
    if not kind.startswith("gemma3"):
        return Marker(taken.placeholder, (begin,), (end,))
    newlines = tuple(tokenizer.encode("\n\n", add_special_tokens=False))
    return Marker(begin, (*newlines, begin), (end, *newlines))


_AROUND = {Modality.IMAGE: ("boi_token", "eoi_token"), Modality.AUDIO: ("boa_token", "eoa_token")}


def _named_id(name: str, files: ModelFiles, tokenizer: Tokenizer) -> int:
    """The id of a token that config.json or the tokenizer names; `ModelError` where neither does."""
    for config in (files.hf_config, files.genai_config.get("model", {})):
        for key in (f"{name}_id", f"{name}_index"):
            if isinstance(config.get(key), int):
                return int(config[key])
    text = getattr(tokenizer.hf, name, None)
    if text is None:
        where = f"neither config.json nor the tokenizer in '{tokenizer.where}'"
        raise ModelError(f"{where} names the '{name}' of this model")
    return int(tokenizer.hf.convert_tokens_to_ids(text))


def cut_media(media: Media, begin: int, length: int) -> Media:
    """The items of the tokens from `begin` on, of `length` tokens. `MediaError` where one would be cut or lost."""
    if media and media[0].start < begin:
        taken = sum(run.item.num_tokens for run in media)
        raise MediaError(
            f"{length} tokens, {taken} of them of {counted(len(media), 'picture or sound', 'pictures or sounds')}, are "
            f"{begin} too many for the model (max_length), and pictures are not cut: give fewer or smaller ones"
        )
    return moved(media, -begin) if begin else media


def with_media(
    messages: Iterable[Mapping[str, Any]], request: RequestT
) -> tuple[list[Mapping[str, Any]], list[Any], list[Any]]:
    """Chat messages for a template, with their pictures and their sounds in order: those that their parts hold, and
    those that their `request` has beside them for parts that hold none. Raises `ConfigError` for a part that is not
    understood, and `MediaError` where more or fewer are given than there are such parts."""
    plain_messages: list[Mapping[str, Any]] = []
    held: dict[Modality, list[Any]] = {modality: [] for modality in Modality}
    for message in messages:
        parts = message.get("content")
        if not isinstance(parts, (list, tuple)):
            plain_messages.append(message)
            continue
        plain = []
        for part in parts:
            if _kind(part) == "text":
                if not isinstance(part.get("text"), str):
                    raise ConfigError(f"a message has a part of the type 'text' whose 'text' is {part.get('text')!r}")
                plain.append(part)
                continue
            modality, item = _item(part)
            held[modality].append(item)
            plain.append({"type": modality.value})
        plain_messages.append({**message, "content": plain})
    return plain_messages, _filled(held, Modality.IMAGE, request.images), _filled(held, Modality.AUDIO, request.audio)


def _filled(held: Mapping[Modality, Sequence[Any]], modality: Modality, beside: Sequence[Any]) -> list[Any]:
    """What the messages hold, with the given items in the open places; all given items where the messages have none."""
    items, kind = held[modality], modality.kind
    num_open = sum(item is None for item in items)
    if num_open != len(beside) and (items or modality is Modality.IMAGE):
        parts = counted(len(items), f"part for a {kind}", f"parts for {kind}s")
        counts = f"the messages have {parts}, {num_open} of them without one"
        raise MediaError(f"{counts}, and the request gives {counted(len(beside), kind)} beside them")
    rest = iter(beside)
    return [next(rest) if item is None else item for item in items] if items else list(beside)


def _kind(part: Any) -> str:
    return str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__


def _item(part: Mapping[str, Any]) -> tuple[Modality, Any]:
    """What a part of a message holds; None where it is given beside the messages."""
    kind = _kind(part)
    if kind in ("image", "audio"):
        return Modality(kind), part.get(kind)
    if kind == "image_url":
        return Modality.IMAGE, data_of_url(_field(part, kind, "url"))
    if kind == "input_audio":
        if (form := _field(part, kind, "format")) != "wav":
            raise UnfitTaskError(f"'input_audio' is in the format '{form}': only wav is read", "input_audio")
        return Modality.AUDIO, decoded(str(_field(part, kind, "data")))
    known = "text, image, image_url, audio and input_audio"
    raise ConfigError(f"a message has a part of the type '{kind}'; {known} are understood")


def _field(part: Mapping[str, Any], kind: str, name: str) -> Any:
    """`part[kind][name]`. Raises `ConfigError` where it is not there."""
    content = part.get(kind)
    if not isinstance(content, Mapping) or name not in content:
        raise ConfigError(f"a message has a part of the type '{kind}' without '{kind}.{name}'")
    return content[name]


NO_SOUND = "the request gives a sound; this model takes none"

RequestT = TypeVar("RequestT", GenerationRequest, ScoringRequest)


@dataclass(frozen=True)
class Encoding:
    """How requests for an encoder-decoder are converted; a session of a decoder has none."""

    start: tuple[int, ...]
    """The tokens with which the decoder begins; empty where no configuration names them."""

    sound: SoundProcessor | None = None
    """Makes features of sound; None where the encoder takes a text or token ids."""

    suppressed: Suppressed = field(default_factory=Suppressed)
    """Tokens that are never generated, by the model's configurations."""

    def begin(self) -> list[int]:
        """`start`; `ConfigError` where it is not known."""
        if not self.start:
            ids = (
                "no configuration of this model names 'decoder_start_token_id': give the decoder's first tokens as ids"
            )
            raise MissingError(ids, "decoder_start_token_id")
        return list(self.start)


def read_encoding(tokenizer: Tokenizer, model: ResolvedModel) -> Encoding | None:
    """How requests for an encoder-decoder are converted; None for a decoder. Raises `ConfigError` for a language or a
    task that the model does not have, and `ModelError` for a token that it has no row for."""
    files, settings = model.processor_files, model.settings
    if model.source is None:
        if settings.language is not None or settings.speech_task is not None:
            raise UnsupportedError(
                "it and 'speech_task' are for models of speech; this one is a decoder alone", "language"
            )
        return None
    kind, source = model.source
    start = read_start(tokenizer, files, settings.language, settings.speech_task)
    sound = SoundProcessor(files, source, settings.engine.threads) if kind is SourceKind.FEATURES else None
    suppressed = read_suppressed(files)
    refuse_named(start, tokenizer.rows.embedding, "decoder_start_token_id")
    refuse_named((*suppressed.everywhere, *suppressed.at_first), tokenizer.rows.vocabulary, "suppress_tokens")
    return Encoding(start, sound, suppressed)


def speech_request(request: RequestT, encoding: Encoding) -> RequestT:
    """The request to a model of speech with the sounds of its chat messages in `audio`, and their text as what the
    decoder begins with: such a model has no roles and no template. Raises `ConfigError` for a part of another kind."""
    name = "prompt" if isinstance(request, GenerationRequest) else "context"
    prompt: Prompt = getattr(request, name)
    if not is_chat(prompt) or encoding.sound is None:
        return request
    messages, images, audio = with_media(prompt, request)
    if images:
        raise UnfitTaskError(f"the messages hold {counted(len(images), 'picture')}; this model takes sound")
    contents = [message.get("content") or "" for message in messages]
    parts = [part for content in contents for part in ([{"text": content}] if isinstance(content, str) else content)]
    changes: dict[str, Any] = {name: "".join(part.get("text", "") for part in parts), "audio": audio}
    return replace(request, **changes)


def decoder_tokens(tokenizer: Tokenizer, prompt: Prompt, encoding: Encoding) -> list[int]:
    """The prompt of an encoder-decoder's decoder: ids as they are, text after the decoder's first tokens."""
    if isinstance(prompt, str):
        return encoding.begin() + (tokenizer.encode_target(prompt) if prompt else [])
    if is_chat(prompt):
        chat = "an encoder-decoder takes no chat messages: give 'source', and text or ids as 'prompt'"
        raise UnsupportedError(chat, "prompt")
    return list(prompt) or encoding.begin()


def make_sources(
    tokenizer: Tokenizer, request: GenerationRequest | ScoringRequest, encoding: Encoding | None, max_length: int
) -> tuple[Source | None, ...]:
    """The engine's source, or one for each window of a sound. Text gets the special tokens of the encoder's tokenizer;
    a text or ids longer than `max_length` lose their beginning, as in HFLM. Raises `ConfigError` where a source is of
    the wrong kind or a text is missing, `MediaError` where a sound is missing, cannot be read or is one too many,
    `TaskError` where the model takes none."""
    source = request.source
    if encoding is None:
        if source is not None:
            raise UnsupportedError("this model has no encoder: give it as the prompt", "source")
        return (None,)
    if request.audio:
        if encoding.sound is None:
            raise TaskError(NO_SOUND)
        if len(request.audio) > 1 or source is not None:
            many = "a 'source' beside 'audio'" if source is not None else counted(len(request.audio), "sound")
            raise MediaError(f"the request gives {many}; this model takes one sound")
        return tuple(map(Source, encoding.sound.windows(request.audio[0])))
    if source is None and encoding.sound is not None:
        raise MediaError("the request gives no sound; this model takes one in 'audio', or its features in 'source'")
    if source is None:
        raise UnsupportedError("this model is an encoder-decoder: 'source' must be a text or token ids", "source")
    if isinstance(source, np.ndarray) and source.dtype.kind == "f":
        if encoding.sound is None:
            raise ConfigError("an array was given; the encoder of this model takes a text or token ids", "source")
        return (Source(source.astype(np.float32, copy=False)),)
    if encoding.sound is not None:
        kind = type(source).__name__
        raise ConfigError(
            f"a {kind} was given; the encoder of this model takes an array of floats (features)", "source"
        )
    ids = tokenizer.encode(source) if isinstance(source, str) else list(source)
    return (Source(np.array((ids or [tokenizer.prefix_token_id])[-max_length:], np.int64)),)
