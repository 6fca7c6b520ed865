"""A session on a streaming transducer: sounds in, transcripts out. It generates as `Session` does, and scores none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from olive_ext.engine.media.transducer import Transducer
from olive_ext.engine.requests import FinishReason
from olive_ext.errors import ConfigError, MediaError, understood
from olive_ext.media.processors import slaney_filters
from olive_ext.media.sound import read_samples
from olive_ext.model import ResolvedModel
from olive_ext.model.files.transducer import blank_penalty, read_pieces, read_transducer, transducer_type
from olive_ext.model.providers.ort_session import open_session
from olive_ext.session.opening import open_model
from olive_ext.session.requests import GenerationOutput, GenerationRequest
from olive_ext.session.session import Session

logger = logging.getLogger(__name__)

_SPACE = "\u2581"
"""SentencePiece's mark of a word's beginning."""


def is_transducer(model: ResolvedModel) -> bool:
    """Whether the model is a package of a transducer."""
    return model.kind == "onnx" and transducer_type(model.files.genai_config) is not None


def opened(model: ResolvedModel) -> Session:
    """A session on the model, whatever it is; a transducer's has what generations take of one."""
    return cast(Session, TransducerSession(model)) if is_transducer(model) else open_model(model)


@dataclass
class Counters:
    """What was done since the session was opened."""

    tokens_generated: int = 0
    requests: int = 0


class TransducerSession(AbstractContextManager["TransducerSession"]):
    """One open package. Greedy: what requests say of sampling, prompts and stops has no meaning here."""

    encoding = None
    journal = None
    max_length = 2**31 - 1
    """No context has an end."""

    def __init__(self, model: ResolvedModel) -> None:
        """Raises `ModelError` for a package of another form, and `ProviderError`."""
        files, settings = model.files, model.settings
        if settings.language is not None or settings.speech_task is not None:
            raise ConfigError("'language' and 'speech_task': a transducer writes down what it hears; leave them out")
        config = read_transducer(files.genai_config, files.directory)
        if config.vad:
            logger.warning("genai_config.json names a detector of speech ('model.vad'): no chunk is dropped here")
        self.model = model
        self.counters = Counters()
        self._pieces = read_pieces(Path(files.tokenizer))
        opening = partial(open_session, providers=model.providers, settings=settings)
        penalty = blank_penalty(files.genai_config, files.directory)
        filters = slaney_filters(config.fft_size // 2 + 1, config.num_mels, config.sample_rate)
        with understood(files.directory):
            self._transducer = Transducer(config, files.directory, opening, model.device, penalty, filters)

    def __exit__(self, *_: object) -> None:
        """The graphs are closed with the session's last reference."""

    def keep_answers(self, path: Path | None, **_: Any) -> None:
        """Nothing: transcripts are computed anew in every run, and no journal has them."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """A transcript of each request's sound. Raises `MediaError` for one that has none, or cannot be read."""
        if any(len(request.audio) != 1 for request in requests):
            raise MediaError("a transducer takes one sound in each request ('audio'), and nothing else")
        rate = self._transducer.config.sample_rate
        sounds = [read_samples(request.audio[0], rate) for request in requests]
        found = self._transducer.search(sounds, [request.max_new_tokens for request in requests])
        self.counters.requests += len(sounds)
        self.counters.tokens_generated += sum(map(len, found))
        return [
            GenerationOutput(
                self.text(tokens),
                tuple(tokens),
                FinishReason.LENGTH if len(tokens) == request.max_new_tokens else FinishReason.STOPPED,
            )
            for tokens, request in zip(found, requests, strict=True)
        ]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without the space before its first word."""
        return "".join(self._pieces.get(token, "") for token in tokens).replace(_SPACE, " ").removeprefix(" ")

    def describe_execution(self) -> dict[str, Any]:
        """What a report says of the run."""
        return {
            "runtime": "onnxruntime",
            "providers": [provider.name for provider in self.model.providers],
            "sounds_together": self._transducer.together,
            "counters": vars(self.counters).copy(),
        }
