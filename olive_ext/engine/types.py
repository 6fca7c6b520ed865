"""What goes into the engine and what comes out: tokens in, log-probabilities and tokens out.

Knows no text, no tokenizer and no session. Axes: T targets of a request, G generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum


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
class Request:
    """`tokens`, of which the last `num_targets` are scored, and what to generate behind them (nothing when None)."""

    tokens: tuple[int, ...]
    num_targets: int = 0
    generation: Generation | None = None


class FinishReason(str, Enum):
    """Why a result is complete."""

    SCORED = "scored"
    STOP_ID = "stop_id"
    STOPPED = "stopped"
    LENGTH = "length"


@dataclass(frozen=True)
class Result:
    """`logprobs[T]` in nats, `is_greedy[T]` (the target was the argmax), `tokens[G]` without the stop id."""

    logprobs: tuple[float, ...] = ()
    is_greedy: tuple[bool, ...] = ()
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.SCORED
