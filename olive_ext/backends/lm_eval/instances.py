"""lm-eval's requests (its `Instance`s) on their way to a session: answered where the answer is known, encoded in
slices, observed. Also requests without an answer, whose documents count in no metric. Knows no model and no session."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

from olive_ext.backends.lm_eval.arguments import GenerationSettings
from olive_ext.errors import LostRequestsError, OliveExtError
from olive_ext.model.providers.devices import trim_host_memory
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")
Method = TypeVar("Method", bound=Callable[..., list[Any]])

Observer = Callable[[Any, Any, Any], None]
"""Called with lm-eval's request, the session's request for it (of `olive_ext.session.requests`), and its output."""

KnownAnswers = Callable[[list[Any], Callable[[list[Any]], list[Any]]], list[Any]]
"""Answers lm-eval's requests, all of one method. Requests that it does not know are passed to its second argument."""

SLICE = 4096
"""Requests of a slice: enough to share prefixes, few enough to hold their tokens."""


@dataclass(eq=False)
class PendingRequest:
    """A session's request, the places of lm-eval's requests (or `Generated`) that its output answers, and the key of
    the request, as errors name it."""

    request: GenerationRequest | ScoringRequest | RollingRequest
    owners: dict[int, Any]
    settings: GenerationSettings | None = None
    """Of a generation."""

    def __repr__(self) -> str:
        return f"of {self.document}"

    @property
    def first(self) -> Any:
        """The first of the requests that it answers."""
        return next(iter(self.owners.values()))

    @property
    def document(self) -> str:
        """The first one's document, as errors name it."""
        return f"task '{self.first.task_name}', document {self.first.doc_id}"


MANY = 10_000
"""With so many requests or more, the garbage collector ignores objects that existed before. With it, a simulated device
waited for the host 12 % of 120,000 requests' time, without 3 % (docs/benchmarks/simulated_device.py)."""


def known_answers_first(method: Method) -> Method:
    """A request method of `OrtLM` before which the model's `known_answers`, if there are any, answer. The garbage
    collector does not visit many requests again and again while they run."""

    @wraps(method)
    def answer(lm: Any, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        ask = partial(method, lm, disable_tqdm=disable_tqdm)
        are_many = len(requests) >= MANY
        if are_many:
            gc.freeze()
        try:
            return ask(requests) if lm.known_answers is None else lm.known_answers(requests, ask)
        finally:
            if are_many:
                gc.unfreeze()

    return cast(Method, answer)


def encoded_slices(
    items: Sequence[Item], key: Callable[[Item], str], encode: Callable[[Sequence[Item]], Encoded], size: int = SLICE
) -> Iterator[Encoded]:
    """The results of `encode` for slices of `items`, sorted by `key`.

    In sorted order neighbours share prefixes, so little sharing is lost between slices. `encode` runs in a thread of
    its own, one slice ahead; its errors are raised here.
    """
    ordered = sorted(items, key=key)
    slices = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as pool:
        begun: deque[Future[Encoded]] = deque()
        for number in range(len(slices)):
            for following in slices[number + len(begun) : number + 2]:
                begun.append(pool.submit(encode, following))
            yield begun.popleft().result()
            trim_host_memory()  # tokenizers leave holes in several threads' memory, which else grow from slice to slice


@dataclass(frozen=True)
class LostRequest:
    """A request without an answer, because every worker that ran it was lost, and how they were lost."""

    task: str
    doc_id: int
    reason: str


class LostRequests(list[LostRequest]):
    """The lost requests of one model."""

    is_read = False
    """Whether the caller leaves their documents out; lm-eval itself would take what is returned for answers."""


def run_requests(
    session: Session, call: str, slices: Iterable[Sequence[PendingRequest]], lost: LostRequests
) -> Iterator[tuple[PendingRequest, Any]]:
    """What a session is asked, with the output, as each completes. What it could not answer is added to `lost`; if
    nobody reads that, the session's error passes. An error about a wrong request names the document."""
    keyed = ([(pending, pending.request) for pending in items] for items in slices)
    try:
        yield from session.run_slices(call, keyed, lambda pending: str(pending.first.task_name))
    except LostRequestsError as error:
        if not lost.is_read:
            raise
        for pending, reason in error.lost.items():
            lost += [LostRequest(str(own.task_name), int(own.doc_id), reason) for own in pending.owners.values()]
    except OliveExtError as error:
        if error.request is None:
            raise
        named = error.__cause__ if isinstance(error.__cause__, OliveExtError) else error
        raise named.inside(error.request.document) from error
