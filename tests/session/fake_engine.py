"""An engine without a model: scores by a formula, generates what it is told, completes the last request first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from olive_ext.engine.requests import FinishReason, KeyedRequest, KeyedResult, Request, Result


@dataclass
class FakeCounters:
    requests: int = 0
    tokens_fed: int = 0


def score(past: Sequence[int], token: int) -> tuple[float, bool]:
    """Depends on the whole past, its order and the token; greedy in most cases."""
    mixed = hash((tuple(past), token)) % 1009
    return -0.01 - mixed / 300, mixed > 100


def naive(context: Sequence[int], target: Sequence[int]) -> list[tuple[float, bool]]:
    whole = [*context, *target]
    return [score(whole[:at], whole[at]) for at in range(len(context), len(whole))]


class FakeEngine:
    """`answers` maps a prompt's tokens to what the model would go on to say; without one it repeats the prompt."""

    at_work = ""

    def __init__(
        self, context_length: int = 512, answers: Mapping[tuple[int, ...], Sequence[int]] | None = None, slots: int = 2
    ) -> None:
        self.context_length = context_length
        self.num_slots = slots
        self.counters: Any = FakeCounters()
        self.requests: list[Request] = []
        self.num_closed = self.num_resets = self.num_released = self.num_open_iterators = 0
        self._answers = dict(answers or {})
        self._slots = slots

    def run_slices(self, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        for items in slices:
            yield from reversed([(key, self._answer(request)) for key, request in items])

    def run_chunks(self, chunks: Iterable[Sequence[KeyedRequest]]) -> Iterator[tuple[int, list[Result]]]:
        yield from ((number, [self._answer(one) for _, one in items]) for number, items in enumerate(chunks))

    def run_continuous(self, items: Iterable[KeyedRequest | None]) -> Iterator[KeyedResult]:
        source = (item for item in items if item is not None)
        self.num_open_iterators += 1
        try:
            while batch := list(islice(source, self._slots)):
                for key, request in reversed(batch):
                    yield key, self._answer(request)
        finally:
            self.num_open_iterators -= 1

    def reset(self) -> None:
        self.num_resets += 1

    def release_memory(self) -> None:
        self.num_released += 1

    def close(self) -> None:
        self.num_closed += 1

    def describe(self) -> dict[str, Any]:
        return {"num_slots": self._slots}

    def _answer(self, request: Request) -> Result:
        assert self.num_closed == 0
        assert request.num_positions <= self.context_length
        self.requests.append(request)
        self.counters.requests += 1
        if request.generation is None:
            cut = len(request.tokens) - request.num_targets
            scored = naive(request.tokens[:cut], request.tokens[cut:])
            return Result(tuple(value for value, _ in scored), tuple(greedy for _, greedy in scored))
        return self._generate(request)

    def _generate(self, request: Request) -> Result:
        generation = request.generation
        tokens: list[int] = []
        for token in self._said(request, tokens):
            if token in generation.stop_ids:
                return Result(tokens=tuple(tokens), finish_reason=FinishReason.STOP_ID, stop_id=token)
            tokens.append(token)
            if generation.is_finished is not None and generation.is_finished(tokens):
                return Result(tokens=tuple(tokens), finish_reason=FinishReason.STOPPED)
            if len(tokens) == generation.max_new_tokens:
                break
        return Result(tokens=tuple(tokens), finish_reason=FinishReason.LENGTH)

    def _said(self, request: Request, tokens: Sequence[int]) -> Iterable[int]:
        """What the model goes on to say behind the `tokens` that it has said."""
        return self._answers.get(request.tokens, request.tokens)
