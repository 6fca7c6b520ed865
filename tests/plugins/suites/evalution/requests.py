"""Requests of all kinds, drawn from the words that the tiny tokenizers know."""

from __future__ import annotations

import random

from evalution.engines.base import GenerationRequest, LoglikelihoodRequest, RollingLoglikelihoodRequest

from tests.exports import TEXT

WORDS = TEXT.split()


class Draw:
    """Draws with a seed of its own; contexts share beginnings."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._stems = [self._words(5, 60) for _ in range(6)]

    def scoring(self, number: int) -> LoglikelihoodRequest:
        """One in seven has no context; one in five is given as ids."""
        metadata = {"number": number}
        if number % 5 == 0:
            return LoglikelihoodRequest(
                context_input_ids=self._ids(1, 80), continuation_input_ids=self._ids(1, 12), metadata=metadata
            )
        context = "" if number % 7 == 0 else self._prompt()
        return LoglikelihoodRequest(context, " " + self._words(1, 6), metadata=metadata)

    def rolling(self, number: int) -> RollingLoglikelihoodRequest:
        """Some longer than the context, one in nine empty, one in four as ids."""
        metadata = {"number": number}
        if number % 4 == 0:
            return RollingLoglikelihoodRequest("", input_ids=self._ids(1, 700), metadata=metadata)
        return RollingLoglikelihoodRequest("" if number % 9 == 0 else self._words(1, 300), metadata=metadata)

    def generation(self, number: int) -> GenerationRequest:
        """Prompts, chats and ids, some with stops."""
        rest = {
            "stop": [[], ["e"], ["zz", " t"]][number % 3],
            "max_new_tokens": 1 + number % 13,
            "metadata": {"number": number},
        }
        if number % 4 == 0:
            return GenerationRequest(messages=[{"role": "user", "content": self._words(1, 20)}], **rest)
        if number % 4 == 1:
            return GenerationRequest(prompt="", rendered_prompt="ids", input_ids=self._ids(1, 40), **rest)
        return GenerationRequest(prompt=self._prompt(), **rest)

    def _prompt(self) -> str:
        return f"{self._rng.choice(self._stems)} {self._words(1, 10)}"

    def _words(self, low: int, high: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(low, high)))

    def _ids(self, low: int, high: int) -> list[int]:
        return [self._rng.randrange(4, 1000) for _ in range(self._rng.randint(low, high))]
