"""What passes between lm-eval and a session, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olive_ext.backends.lm_eval.generation import GenerationSettings
from olive_ext.text.requests import GenerationRequest

Key = tuple[str, str] | None
TokenRequest = tuple[Key, Sequence[int], Sequence[int]]
Answer = tuple[float, bool]

CERTAIN: Answer = (0.0, True)
"""What there is to say about an empty continuation."""


@dataclass(frozen=True)
class Wanted:
    """One generation, and the requests (by index) that it answers."""

    settings: GenerationSettings
    request: GenerationRequest
    owners: list[int]
