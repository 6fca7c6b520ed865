"""Requests that cross windows and share prefixes, and how far a session's answers are from a reference's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports import VOCAB, Export
from tests.exports.plain import plain_logits

EOS = 1


class Reference(Protocol):
    def score(self, context: Sequence[int], target: Sequence[int]) -> object: ...


class Plain:
    """The export's own graph, untouched, in whole forward passes."""

    def __init__(self, package: Export) -> None:
        self._package = package

    def score(self, context: Sequence[int], target: Sequence[int]) -> list[float]:
        logits_SV = plain_logits(self._package, [*context, *target][:-1]).astype(np.float64)
        logits_TV = logits_SV[len(context) - 1 :]
        largest_T1 = logits_TV.max(-1, keepdims=True)
        logprobs_TV = logits_TV - largest_T1 - np.log(np.exp(logits_TV - largest_T1).sum(-1, keepdims=True))
        return [float(row[token]) for row, token in zip(logprobs_TV, target, strict=True)]

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens before the end-of-sequence token (id 1)."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            following = int(plain_logits(self._package, tokens)[-1].argmax())
            if following == EOS:
                break
            tokens.append(following)
        return tokens[len(prompt) :]


def scoring_requests(count: int = 40, longest_stem: int = 150) -> list[ScoringRequest]:
    """Shared and lonely contexts of 1 to `longest_stem` + 20 tokens, targets of 1 to 20."""
    rng = random.Random(5)

    def draw(low: int, high: int) -> list[int]:
        return [rng.randrange(4, VOCAB) for _ in range(rng.randint(low, high))]

    stems = [draw(1, longest_stem) for _ in range(5)]
    requests = [ScoringRequest(rng.choice(stems) + draw(0, 20), draw(1, 20)) for _ in range(count)]
    return requests + [ScoringRequest(draw(1, 2), draw(1, 20)) for _ in range(5)]


def prompts() -> list[list[int]]:
    """Shorter and longer than a window of 16 tokens, and one that crosses it while generating."""
    rng = random.Random(3)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in (1, 5, 15, 17, 60)]


def expected_scores(reference: Reference, requests: Sequence[ScoringRequest]) -> list[list[float]]:
    """`reference` answers with log-probabilities, alone or before something else."""
    answers = [reference.score(request.context, request.target) for request in requests]
    return [answer[0] if isinstance(answer, tuple) else answer for answer in answers]  # type: ignore[misc]


def largest_difference(session: Session, requests: Sequence[ScoringRequest], expected: list[list[float]]) -> float:
    """Of a log-probability, in nats."""
    found = session.loglikelihood(requests)
    pairs = (
        (a, b)
        for output, row in zip(found, expected, strict=True)
        for a, b in zip(output.token_logprobs, row, strict=True)
    )
    return max(abs(a - b) for a, b in pairs)


def generated(session: Session, num_tokens: int = 24) -> list[list[int]]:
    outputs = session.generate([GenerationRequest(prompt, max_new_tokens=num_tokens) for prompt in prompts()])
    return [list(output.tokens) for output in outputs]
