"""Requests to an encoder-decoder: what its encoder is given, and what its decoder begins with. Knows no engine run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from olive_ext.errors import ConfigError, MediaError, MissingError, TaskError, UnfitTaskError, UnsupportedError, counted
from olive_ext.media.items import Source
from olive_ext.media.sound import SoundProcessor
from olive_ext.model import ResolvedModel
from olive_ext.model.files.package_config import Suppressed, read_suppressed
from olive_ext.model.types import SourceKind, TensorSpec
from olive_ext.session.generation_bounds import read_start
from olive_ext.session.placeholders import with_media
from olive_ext.session.requests import GenerationRequest, Prompt, ScoringRequest, SourceInput, is_chat
from olive_ext.session.tokenizer import Tokenizer, refuse_named

NO_SOUND = "the request gives a sound; this model takes none"

Asked = TypeVar("Asked", GenerationRequest, ScoringRequest)


@dataclass(frozen=True)
class Encoding:
    """What decides how requests for an encoder-decoder are converted; a session of a decoder has none."""

    takes_features: bool
    start: tuple[int, ...]
    """Tokens with which the decoder begins; empty where no configuration names them."""

    sound: SoundProcessor | None = None
    """Makes features of sound; None where the encoder takes none."""

    suppressed: Suppressed = field(default_factory=Suppressed)
    """Tokens that are never generated, by the model's configurations."""

    def begin(self) -> list[int]:
        """`start`; `ConfigError` where it is not known."""
        if not self.start:
            raise MissingError(
                "no configuration of this model names 'decoder_start_token_id': give the decoder's first tokens as ids"
            )
        return list(self.start)


def read_encoding(
    tokenizer: Tokenizer, model: ResolvedModel, taken: tuple[SourceKind | None, TensorSpec | None]
) -> Encoding | None:
    """How requests for a model are converted whose encoder takes `taken`, its kind and its input; None for a decoder.
    Raises `ConfigError` for a language or a task that the model does not have, and `ModelError` for a token that it has
    no row for."""
    (kind, source), files, settings = taken, model.processor_files, model.settings
    if kind is None:
        if settings.language is not None or settings.speech_task is not None:
            raise UnsupportedError(
                "it and 'speech_task' are for models of speech; this one is a decoder alone", "language"
            )
        return None
    takes_features = kind is SourceKind.FEATURES
    start = read_start(tokenizer, files, settings.language, settings.speech_task)
    sound = SoundProcessor(files, source, settings.engine.threads) if takes_features and source is not None else None
    suppressed = read_suppressed(files)
    refuse_named(start, tokenizer.rows.embedding, "decoder_start_token_id")
    refuse_named((*suppressed.everywhere, *suppressed.at_first), tokenizer.rows.vocabulary, "suppress_tokens")
    return Encoding(takes_features, start, sound, suppressed)


def spoken(request: Asked, encoding: Encoding) -> Asked:
    """The request to a model of speech with the sounds of its chat messages in `audio`, and their text as what the
    decoder begins with: such a model has no roles and no template. Raises `ConfigError` for a part of another kind."""
    name = "prompt" if isinstance(request, GenerationRequest) else "context"
    prompt: Prompt = getattr(request, name)
    if not is_chat(prompt) or encoding.sound is None:
        return request
    messages, images, audio = with_media(prompt, request.images, request.audio)
    if images:
        raise UnfitTaskError(f"the messages hold {counted(len(images), 'picture')}; this model takes sound")
    contents = [message.get("content") or "" for message in messages]
    parts = [part for content in contents for part in ([{"text": content}] if isinstance(content, str) else content)]
    changes: dict[str, Any] = {name: "".join(part.get("text", "") for part in parts), "audio": audio}
    return replace(request, **changes)


def decoder_tokens(tokenizer: Tokenizer, prompt: Prompt, encoding: Encoding) -> list[int]:
    """The prompt of an encoder-decoder's decoder: ids as they are, text after the decoder's first tokens."""
    if isinstance(prompt, str):
        return encoding.begin() + (tokenizer.encode_answer(prompt) if prompt else [])
    if is_chat(prompt):
        raise UnsupportedError("an encoder-decoder takes no chat messages: give 'source', and text or ids as 'prompt'")
    return list(prompt) or encoding.begin()


def make_source(
    tokenizer: Tokenizer, given: SourceInput | None, encoding: Encoding | None, max_length: int
) -> Source | None:
    """The engine's source. Text gets the special tokens of the encoder's tokenizer; a text or ids longer than
    `max_length` lose their beginning, as in HFLM. Raises `ConfigError` where a source is of the wrong kind or a text is
    missing, and `MediaError` where a sound is.
    """
    if encoding is None:
        if given is not None:
            raise UnsupportedError("this model has no encoder: give it as the prompt", "source")
        return None
    if given is None and encoding.takes_features:
        raise MediaError("the request gives no sound; this model takes one in 'audio', or its features in 'source'")
    if given is None:
        raise UnsupportedError("this model is an encoder-decoder: 'source' must be a text or token ids")
    if isinstance(given, np.ndarray) and given.dtype.kind == "f":
        if not encoding.takes_features:
            raise ConfigError("an array was given; the encoder of this model takes a text or token ids", "source")
        return Source(given.astype(np.float32, copy=False))
    if encoding.takes_features:
        kind = type(given).__name__
        raise ConfigError(
            f"a {kind} was given; the encoder of this model takes an array of floats (features)", "source"
        )
    ids = tokenizer.encode(given) if isinstance(given, str) else list(given)
    return Source(np.array((ids or [tokenizer.prefix_token_id])[-max_length:], np.int64))


def make_sources(
    tokenizer: Tokenizer, request: GenerationRequest | ScoringRequest, encoding: Encoding | None, max_length: int
) -> tuple[Source | None, ...]:
    """The engine's source, or one for each window of a sound that an encoder-decoder is given. Raises as `make_source`
    does, `MediaError` for a sound that cannot be read or is one too many, `TaskError` where the model takes none."""
    if not request.audio or encoding is None:
        return (make_source(tokenizer, request.source, encoding, max_length),)
    if encoding.sound is None:
        raise TaskError(NO_SOUND)
    if len(request.audio) > 1 or request.source is not None:
        given = "a 'source' beside 'audio'" if request.source is not None else counted(len(request.audio), "sound")
        raise MediaError(f"the request gives {given}; this model takes one sound")
    return tuple(map(Source, encoding.sound.windows(request.audio[0])))


def answer_tokens(tokenizer: Tokenizer, request: ScoringRequest, encoding: Encoding) -> tuple[list[int], list[int]]:
    """(context, target) for an encoder-decoder's decoder, each encoded alone."""
    target = request.target
    target_ids = tokenizer.encode_answer(target) if isinstance(target, str) else list(target)
    if not target_ids:
        raise TaskError("the target has no tokens: there is nothing to score")
    return decoder_tokens(tokenizer, request.context, encoding), target_ids
