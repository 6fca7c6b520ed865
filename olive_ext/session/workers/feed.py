"""Reads chunks ahead of the workers, and hands out pieces of them. Knows no worker."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from olive_ext.engine.requests import Lost, Request, Result
from olive_ext.engine.scheduling.chunks import predicted_tokens

AHEAD = 4
"""Chunks that wait for each worker at most. They are what the largest are begun first of at the end."""

HELD_TOKENS = 1 << 24
"""Tokens of requests that are under way at most, about: some 300 MB. One chunk is read whatever it has."""

_TOKENS_BESIDE = 128
"""As many tokens take the memory that a request takes besides its own."""


@dataclass(frozen=True)
class Piece:
    """Requests of one chunk that run together: the whole chunk, or a part of one that has cost workers."""

    chunk: int
    places: Sequence[int]
    num_kills: int = 0

    def halves(self) -> Iterator[Piece]:
        """What is tried where the whole costs workers again and again."""
        middle = len(self.places) // 2
        for places in (self.places[:middle], self.places[middle:]):
            yield Piece(self.chunk, places, 1)


@dataclass
class _Chunk:
    requests: Sequence[Request]
    results: dict[int, Result | Lost] = field(default_factory=dict)

    @property
    def held_tokens(self) -> int:
        return sum(len(request.tokens) + _TOKENS_BESIDE for request in self.requests)


class Feed:
    """The chunks of one call. Pieces are taken by the workers' threads; all else is for the thread that called.

    Pieces are handed out in the order of their chunks, so that what came first is complete first, and forgotten; once
    no more chunks follow, the largest first, so that the workers end together. What cost a worker comes last.
    """

    def __init__(self, chunks: Iterable[Sequence[Request]], num_workers: int) -> None:
        self._source = enumerate(chunks)
        self._num_ahead = AHEAD * num_workers
        self._chunks: dict[int, _Chunk] = {}
        self._num_tokens = 0
        self._has_more = True
        self._waiting: queue.PriorityQueue[tuple[tuple[int, ...], Piece | None]] = queue.PriorityQueue()

    @property
    def has_work(self) -> bool:
        """Whether a chunk is not complete yet."""
        return self._has_more or bool(self._chunks)

    @property
    def num_waiting(self) -> int:
        """Pieces that nobody has taken yet."""
        return self._waiting.qsize()

    def read(self) -> bool:
        """Reads the next chunk; False where there is no room for it, or none left."""
        is_full = self.num_waiting >= self._num_ahead or (self._chunks and self._num_tokens >= HELD_TOKENS)
        if not self._has_more or is_full:
            return False
        number, requests = next(self._source, (0, None))
        if requests is None:
            self._has_more = False
            self._sort()
            return False
        self._chunks[number] = chunk = _Chunk(requests)
        self._num_tokens += chunk.held_tokens
        self._put(Piece(number, range(len(requests))))
        return True

    def take(self) -> tuple[Piece, list[Request]] | None:
        """Waits for a piece; None when there are no more."""
        piece = self._waiting.get()[1]
        if piece is None:
            return None
        requests = self._chunks[piece.chunk].requests
        return piece, [requests[place] for place in piece.places]

    def put_back(self, *pieces: Piece) -> None:
        """They are taken again, behind all others."""
        for piece in pieces:
            self._put(piece)

    def complete(self, piece: Piece, results: Sequence[Result | Lost]) -> list[Result | Lost] | None:
        """The results of the piece's chunk, where these are the last of them."""
        chunk = self._chunks[piece.chunk]
        chunk.results.update(zip(piece.places, results, strict=True))
        if len(chunk.results) < len(chunk.requests):
            return None
        del self._chunks[piece.chunk]
        self._num_tokens -= chunk.held_tokens
        return [chunk.results[place] for place in range(len(chunk.requests))]

    def end(self, num_takers: int) -> None:
        """Tells those who take that there is nothing more."""
        for number in range(num_takers):
            self._waiting.put(((-1, number), None))

    def _put(self, piece: Piece) -> None:
        first = 0 if self._has_more else -predicted_tokens(self._chunks[piece.chunk].requests)
        key = (1 if piece.num_kills else 0, first, piece.chunk, piece.places[0])
        self._waiting.put((key, piece))

    def _sort(self) -> None:
        waiting: list[Piece] = []
        with suppress(queue.Empty):  # workers take from it meanwhile
            while (piece := self._waiting.get_nowait()[1]) is not None:
                waiting.append(piece)
        for piece in waiting:
            self._put(piece)
