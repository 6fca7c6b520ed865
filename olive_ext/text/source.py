"""What an encoder-decoder is given: a source for the encoder, as text, token ids or features, and where answers begin.

Knows no audio: features are made by whoever has the sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.engine.requests import Source
from olive_ext.errors import ConfigError
from olive_ext.text.stopping import read_configs
from olive_ext.text.tokenizer import Tokenizer

Asked: TypeAlias = str | Sequence[int] | npt.NDArray[Any]
"""A text or token ids for an encoder of text; an array of features without a batch axis for one of sound."""


@dataclass(frozen=True)
class Encoding:
    """What the session knows of a model's encoder."""

    takes_features: bool
    start: tuple[int, ...]
    """Tokens with which the decoder begins; empty where no configuration names them."""

    def begin(self) -> list[int]:
        """`start`; `ConfigError` where it is not known."""
        if not self.start:
            raise ConfigError(
                "no configuration of this model names 'decoder_start_token_id': give the decoder's first tokens as ids"
            )
        return list(self.start)


def read_start(directory: Path, genai_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens with which a decoder begins: `decoder_start_token_id` of genai_config.json, generation_config.json or
    config.json in `directory`, the first that names it."""
    for section in (genai_config.get("model", {}), *read_configs(directory)):
        named = section.get("decoder_start_token_id")
        if named is not None:
            return (named,) if isinstance(named, int) else tuple(named)
    return ()


def make_source(tokenizer: Tokenizer, asked: Asked | None, encoding: Encoding | None, max_length: int) -> Source | None:
    """The engine's source. Text gets the special tokens of the encoder's tokenizer; a text or ids longer than
    `max_length` lose their beginning, as in HFLM. Raises `ConfigError` where a source is missing or of the wrong kind.
    """
    if encoding is None:
        if asked is not None:
            raise ConfigError("'source' is for encoder-decoders; this model has no encoder: give it as the prompt")
        return None
    if asked is None:
        wanted = "features" if encoding.takes_features else "a text or token ids"
        raise ConfigError(f"this model is an encoder-decoder: 'source' must be {wanted}")
    if isinstance(asked, np.ndarray) and asked.dtype.kind == "f":
        if not encoding.takes_features:
            raise ConfigError("'source' is an array of features; the encoder of this model takes a text or token ids")
        return Source(asked.astype(np.float32, copy=False))
    if encoding.takes_features:
        given = type(asked).__name__
        raise ConfigError(f"'source' is a {given}; the encoder of this model takes features: give an array of floats")
    ids = tokenizer.encode(asked) if isinstance(asked, str) else list(asked)
    return Source(np.array((ids or [tokenizer.prefix_token_id])[-max_length:], np.int64))
