"""What a caller may ask of a session, as the engine's requests, by the session's tokenizer, length and media."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from olive_ext.errors import ConfigError, TaskError
from olive_ext.text.conversion import Converted, convert_generation, convert_rolling, convert_scoring
from olive_ext.text.requests import (
    GenerationOutput,
    GenerationRequest,
    Prompt,
    RollingOutput,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
    Text,
)
from olive_ext.text.token_ids import refuse_unknown

if TYPE_CHECKING:
    from olive_ext.session.session import Session

Output = TypeVar("Output")
ToGenerate: TypeAlias = GenerationRequest | Prompt
ToScore: TypeAlias = ScoringRequest | tuple[Prompt, Text]
ToRoll: TypeAlias = RollingRequest | Text


def to_generation(session: Session, asked: ToGenerate) -> Converted[GenerationOutput]:
    """A prompt alone is continued with the defaults."""
    request = asked if isinstance(asked, GenerationRequest) else GenerationRequest(asked)
    about = session.stop_ids, session.max_length, session.encoding, session.media
    return _known(session, convert_generation(session.tokenizer, request, *about))


def to_scoring(session: Session, asked: ToScore) -> Converted[ScoringOutput]:
    """Raises `ConfigError` for what is neither a pair nor a request."""
    if not isinstance(asked, ScoringRequest):
        if not isinstance(asked, (tuple, list)) or len(asked) != 2:
            raise ConfigError(f"{type(asked).__name__}: a (context, target) pair or a ScoringRequest is expected")
        asked = ScoringRequest(*asked)
    about = session.max_length, session.encoding, session.media
    return _known(session, convert_scoring(session.tokenizer, asked, *about))


def to_rolling(session: Session, asked: ToRoll) -> Converted[RollingOutput]:
    """Raises `TaskError` for an encoder-decoder."""
    if session.encoding is not None:
        raise TaskError("an encoder-decoder has no likelihood of a text alone: score a target behind a source")
    request = asked if isinstance(asked, RollingRequest) else RollingRequest(asked)
    return _known(session, convert_rolling(session.tokenizer, request, session.max_length, session.media))


def _known(session: Session, converted: Converted[Output]) -> Converted[Output]:
    """The same; raises `TaskError` for a token that the model has no row for."""
    for request in converted.requests if session.model is not None else ():  # else it is not known what it has
        refuse_unknown(request, session.tokenizer, () if session.media is None else session.media.placeholders)
    return converted
