"""Requests that are kept of a comparison while it runs: those of documents drawn at random, to be run again in other
forms, and those that are farthest apart, to be looked into. Knows no statistics."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.plugins.diagnose.places.decision import FloatArray
from olive_ext.session.requests import RollingOutput, RollingRequest, ScoringOutput, ScoringRequest

MOST_DOCUMENTS = 64
MOST_REQUESTS = 1
"""Requests of a document: its choices share a context, which each of them would have computed again."""

MOST_APART = 32


@dataclass(frozen=True)
class Kept:
    """A request with what both places said: log-probabilities of its targets in nats, [T] each."""

    task: str
    document: int
    request: ScoringRequest | RollingRequest
    own: FloatArray
    other: FloatArray
    positions: npt.NDArray[np.int64]
    """Tokens before each target that the models attended to, [T]."""

    targets: npt.NDArray[np.int64]

    @property
    def size(self) -> int:
        """Tokens to be fed, about."""
        return int(self.positions.max(initial=0)) + 1 if isinstance(self.request, ScoringRequest) else len(self.own)

    @property
    def apart(self) -> FloatArray:
        """How far apart the two places are at each target, in nats."""
        return np.abs(self.own - self.other)

    def tokens(self, target: int) -> list[int] | None:
        """What was fed up to the position where this target is predicted; None where it is not known as tokens."""
        position = int(self.positions[target])
        if isinstance(self.request, ScoringRequest):
            before: Any = self.request.context
        else:
            before = () if self.request.prefix is None else (self.request.prefix,)
        if isinstance(before, str) or (len(before) and not isinstance(before[0], int)):
            return None
        whole = [*before, *self.targets[:target].tolist()]
        return whole[len(whole) - position :] if 0 < position <= len(whole) else None


class Sample:
    """`MOST_DOCUMENTS` documents of each task at most, those with the smallest digests of their numbers: every document
    is among them with the same probability, however many come."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[tuple[int, int], list[Kept]]] = {}
        self._apart: list[tuple[float, int, Kept]] = []
        self._count = 0

    def note(
        self, task: str, document: int, request: ScoringRequest | RollingRequest, output: ScoringOutput | RollingOutput
    ) -> None:
        """Notes a compared request."""
        compared = output.compared
        if compared is None or not len(compared):
            return
        own, other = np.asarray(output.token_logprobs, np.float64), np.asarray(compared.reference_logprobs, np.float64)
        kept = Kept(task, document, request, own, other, compared.positions, compared.targets)
        self._count += 1
        heapq.heappush(self._apart, (float(np.nan_to_num(kept.apart).max()), self._count, kept))
        if len(self._apart) > MOST_APART:
            heapq.heappop(self._apart)
        documents = self._tasks.setdefault(task, {})
        key = (zlib.crc32(f"{task} {document}".encode()), document)
        if key in documents or len(documents) < MOST_DOCUMENTS or key < max(documents):
            if len(documents.setdefault(key, [])) < MOST_REQUESTS:
                documents[key].append(kept)
            if len(documents) > MOST_DOCUMENTS:
                del documents[max(documents)]

    def documents(self) -> Iterator[list[Kept]]:
        """The requests of each drawn document, the tasks by turns, in an order that is random within each."""
        ordered = [[documents[key] for key in sorted(documents)] for documents in self._tasks.values()]
        for turn in itertools.zip_longest(*ordered):
            yield from (document for document in turn if document is not None)

    def apart(self) -> list[Kept]:
        """The requests that are farthest apart, at most `MOST_APART`."""
        return [kept for *_, kept in sorted(self._apart, reverse=True)]
