"""Requests of many lengths that share prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from olive_ext.session.requests import ScoringRequest
from tests.exports import CONTEXT, VOCAB


def questions_with_endings(num_questions: int, endings: Sequence[int], seed: int = 3) -> list[ScoringRequest]:
    """Questions behind shared examples, each with endings of these numbers of tokens; some fill the context to its last
    position."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(4, VOCAB) for _ in range(count)]

    requests = []
    for examples in (words(200), words(30), words(CONTEXT - 40), []):
        for _ in range(num_questions):
            question = examples + words(rng.randint(5, 30))
            room = CONTEXT + 1 - len(question)
            requests += [ScoringRequest(question, words(min(room, count))) for count in endings]
    return requests
