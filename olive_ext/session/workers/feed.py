"""Reads chunks ahead of the workers, and hands them out. Knows no worker."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from olive_ext.engine.requests import Request
from olive_ext.engine.scheduling.chunks import predicted_tokens

AHEAD = 4
"""Chunks that wait for each worker at most: at the end of a call the largest of those that wait begin first."""

HELD_TOKENS = 1 << 24
"""Tokens of requests that are under way at most, about: some 300 MB. One chunk is read whatever it has."""

_OVERHEAD_TOKENS = 128
"""As many tokens take the memory that a request takes besides its own."""


class ChunkFeed:
    """The chunks of one call. They are taken by the workers' threads; all else is for the thread that called.

    They are handed out in their order, so that early ones are complete first, and forgotten; once no more follow, the
    largest first, so that the workers end together. A chunk that cost a worker comes last.
    """

    def __init__(self, chunks: Iterable[Sequence[Request]], num_workers: int) -> None:
        self._source = enumerate(chunks)
        self._num_ahead = AHEAD * num_workers
        self._chunks: dict[int, Sequence[Request]] = {}
        self._num_tokens = 0
        self._has_more = True
        self._has_ended = False
        self._waiting: list[int] = []
        self._costly: set[int] = set()
        self._changed = threading.Condition()

    @property
    def has_work(self) -> bool:
        """Whether a chunk is not complete yet."""
        return self._has_more or bool(self._chunks)

    @property
    def num_waiting(self) -> int:
        """Chunks that nobody has taken yet."""
        return len(self._waiting)

    def read(self) -> bool:
        """Reads the next chunk; False where there is no room for it, or none left."""
        is_full = self.num_waiting >= self._num_ahead or (self._chunks and self._num_tokens >= HELD_TOKENS)
        if not self._has_more or is_full:
            return False
        number, requests = next(self._source, (0, None))
        if requests is None:
            self._has_more = False
            return False
        self._chunks[number] = requests
        self._num_tokens += _held_tokens(requests)
        self._put(number)
        return True

    def take(self) -> tuple[int, Sequence[Request]] | None:
        """Waits for a chunk, and gives its number and its requests; None when there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended)
            if self._has_ended:
                return None
            number = min(self._waiting, key=self._order)
            self._waiting.remove(number)
            return number, self._chunks[number]

    def put_back(self, number: int) -> bool:
        """Lets a chunk that cost a worker be taken once more, after all others; False where it has cost one before."""
        if number in self._costly:
            return False
        self._costly.add(number)
        self._put(number)
        return True

    def complete(self, number: int) -> Sequence[Request]:
        """Forgets a chunk; its requests."""
        requests = self._chunks.pop(number)
        self._num_tokens -= _held_tokens(requests)
        return requests

    def end(self) -> None:
        """Lets `take` return None from now on."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _put(self, number: int) -> None:
        with self._changed:
            self._waiting.append(number)
            self._changed.notify()

    def _order(self, number: int) -> tuple[bool, int, int]:
        first = 0 if self._has_more else -predicted_tokens(self._chunks[number])
        return number in self._costly, first, number


def _held_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.tokens) + _OVERHEAD_TOKENS for request in requests)
