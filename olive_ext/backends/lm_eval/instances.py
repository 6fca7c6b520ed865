"""lm-eval's requests (its `Instance`s) on their way to a session: answered where known, encoded in slices, observed.

Knows no model and no session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

from lm_eval.api.model import TemplateLM

from olive_ext.backends.lm_eval.generation_settings import GenerationSettings
from olive_ext.model.free_memory import trim_host_memory
from olive_ext.text.requests import GenerationRequest
from olive_ext.text.tokenizer import Tokenizer

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")
Method = TypeVar("Method", bound=Callable[..., list[Any]])

Observer = Callable[[Any, Any, Any], None]
"""Called with lm-eval's request, the session's request for it (of `olive_ext.text.requests`), and its output."""

KnownAnswers = Callable[[list[Any], Callable[[list[Any]], list[Any]]], list[Any]]
"""Answers lm-eval's requests, all of one method; those it does not know it passes on to its second argument."""

TokenRequest = tuple[Any, ...]
"""lm-eval's cache key, context ids and target ids, and perhaps the context's pictures."""

Answer = tuple[float, bool]
CERTAIN: Answer = (0.0, True)
"""The answer for an empty continuation."""

SLICE = 4096
"""Requests of a slice: enough to share prefixes in, few enough to hold their tokens."""


@dataclass(frozen=True)
class PendingGeneration:
    """One generation, and the indices of lm-eval's requests that its output answers."""

    settings: GenerationSettings
    request: GenerationRequest
    owners: list[int]


class CompletePairs(TemplateLM):  # type: ignore[misc]
    """A mix-in for models of lm-eval: its rule for a context and its continuation, and ours where that leaves a side
    without tokens."""

    _text: Tokenizer
    """The tokenizer, with the model's own settings."""

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """HFLM's cut; where that leaves one side without tokens, a cut before the token that spans the join."""
        if context:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            if all(pair):
                return pair
        return self._text.encode_pair(context, continuation)


def known_answers_first(method: Method) -> Method:
    """A request method of `OrtLM` that lets the model's `known_answers`, where there are any, answer before it."""

    @wraps(method)
    def answer(lm: Any, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        ask = partial(method, lm, disable_tqdm=disable_tqdm)
        return ask(requests) if lm.known_answers is None else lm.known_answers(requests, ask)

    return cast(Method, answer)


def encoded_slices(
    items: Sequence[Item],
    key: Callable[[Item], str],
    encode: Callable[[Sequence[Item]], Encoded],
    size: int = SLICE,
) -> Iterator[tuple[list[int], Encoded]]:
    """(indices into `items`, result of `encode` for these items) for slices of `items` sorted by `key`.

    In sorted order neighbours share prefixes, so little sharing is lost between slices. `encode` runs in a thread of
    its own, one slice ahead; what it raises is raised here.
    """
    order = sorted(range(len(items)), key=lambda place: key(items[place]))
    slices = [order[start : start + size] for start in range(0, len(order), size)]
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as pool:
        begun: deque[Future[Encoded]] = deque()
        for number, places in enumerate(slices):
            for following in slices[number + len(begun) : number + 2]:
                begun.append(pool.submit(encode, [items[place] for place in following]))
            yield places, begun.popleft().result()
            trim_host_memory()  # tokenizers leave holes in several threads' memory, which else grow from slice to slice
