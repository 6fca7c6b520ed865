"""What goes into the engine and what comes out: tokens in, log-probabilities and tokens out.

Knows no text, no tokenizer and no session. Axes: T targets of a request, G generated tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.errors import OliveExtError
from olive_ext.stats.compared_fields import COMPARED, Compared


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. `temperature` 0 is greedy and needs nothing else.

    Filters apply in Hugging Face's order: temperature, then top_k (0 = off), then top_p (1.0 = off).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Generation:
    """Tokens wanted behind a request's own: at most `max_new_tokens`, ending on one of `stop_ids`.

    `is_finished`, where given, sees all tokens generated so far after each one and ends the sequence with True.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    is_finished: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True)
class Source:
    """What an encoder is given: token ids [S] (integers), or features without a batch axis (floating point).

    Two are equal when their content is.
    """

    array: npt.NDArray[Any] = field(compare=False)
    key: str = field(init=False)
    """Digest of type, shape and content."""

    def __post_init__(self) -> None:
        content = np.ascontiguousarray(self.array)
        digest = hashlib.sha256(f"{content.dtype.str} {content.shape} ".encode())
        digest.update(content.tobytes())
        object.__setattr__(self, "array", content)
        object.__setattr__(self, "key", digest.hexdigest())


def refuse_source(source: Source | None) -> None:
    """Raises for a source that is meant for a model without an encoder."""
    if source is not None:
        raise OliveExtError("the request has a source, but this model has no encoder: give it as the prompt")


@dataclass(frozen=True)
class Request:
    """`tokens`, of which the last `num_targets` are scored, and what to generate behind them (nothing when None).

    `source` is for the encoder of an encoder-decoder, whose decoder is given `tokens`.
    """

    tokens: tuple[int, ...]
    num_targets: int = 0
    generation: Generation | None = None
    source: Source | None = None
    records: tuple[int, ...] = ()
    """Of each target: the number of the reference's record of the distribution that it is scored with."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_targets < max(1, len(self.tokens)):
            raise OliveExtError(
                f"a target needs a token before it: {self.num_targets} of {len(self.tokens)} are targets"
            )
        if self.generation is None and self.num_targets == 0:
            raise OliveExtError("a request asks for nothing: give targets or a generation")
        if self.generation is not None and (not self.tokens or self.generation.max_new_tokens < 1):
            raise OliveExtError("a generation needs at least one token before it and max_new_tokens of at least 1")

    @property
    def num_positions(self) -> int:
        """Positions it occupies at most: the last token, scored or generated, is not fed."""
        return len(self.tokens) - 1 + (self.generation.max_new_tokens if self.generation else 0)


class FinishReason(str, Enum):
    """Why a result is complete."""

    SCORED = "scored"
    STOP_ID = "stop_id"
    STOPPED = "stopped"
    LENGTH = "length"


Notes = npt.NDArray[np.void]


@dataclass(frozen=True)
class Result:
    """`logprobs[T]` in nats, `is_greedy[T]` (the target was the argmax), `tokens[G]` without the stop id."""

    logprobs: tuple[float, ...] = ()
    is_greedy: tuple[bool, ...] = ()
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.SCORED
    notes: Notes | None = field(default=None, compare=False)
    """Per-target notes of the runner: `COMPARED`[T] where there is a reference."""


def join_compared(requests: Sequence[Request], results: Sequence[Result]) -> Compared | None:
    """The compared fields of all requests' targets, one request behind the other; None without a reference."""
    parts = [result.notes for result in results if result.notes is not None and result.notes.dtype == COMPARED]
    if len(parts) < len(requests) or not parts:
        return None
    notes_T = np.concatenate(parts)
    scored = [(request.tokens, len(request.tokens) - request.num_targets) for request in requests]
    targets = np.concatenate([np.array(tokens[first:], np.int64) for tokens, first in scored])
    positions = np.concatenate([np.arange(first, len(tokens)) for tokens, first in scored])
    fields: dict[str, Any] = {name: notes_T[name].copy() for name in COMPARED.names or ()}
    return Compared(**fields, targets=targets, positions=positions)
