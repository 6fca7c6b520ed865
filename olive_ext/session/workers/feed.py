"""Reads chunks ahead of the workers, and hands out pieces of them. Knows no worker."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from olive_ext.engine.requests import Lost, Request, Result
from olive_ext.engine.scheduling.chunks import predicted_tokens

AHEAD = 4
"""Chunks that wait for each worker at most: at the end of a call the largest of those that wait begin first."""

HELD_TOKENS = 1 << 24
"""Tokens of requests that are under way at most, about: some 300 MB. One chunk is read whatever it has."""

_OVERHEAD_TOKENS = 128
"""As many tokens take the memory that a request takes besides its own."""


@dataclass(frozen=True)
class Piece:
    """Requests of one chunk that run together, by their indices: the whole, or part of one that cost workers."""

    chunk: int
    indices: Sequence[int]
    num_kills: int = 0

    def halves(self) -> Iterator[Piece]:
        """The two halves, which are tried where the whole costs workers again and again."""
        middle = len(self.indices) // 2
        for indices in (self.indices[:middle], self.indices[middle:]):
            yield Piece(self.chunk, indices, 1)


@dataclass
class _Chunk:
    requests: Sequence[Request]
    results: dict[int, Result | Lost] = field(default_factory=dict)

    @cached_property
    def held_tokens(self) -> int:
        return sum(len(request.tokens) + _OVERHEAD_TOKENS for request in self.requests)

    @cached_property
    def cost(self) -> int:
        return predicted_tokens(self.requests)


class ChunkFeed:
    """The chunks of one call. Pieces are taken by the workers' threads; all else is for the thread that called.

    Pieces are handed out in the order of their chunks, so that early chunks are complete first, and forgotten; once
    no more chunks follow, the largest first, so that the workers end together. A piece that cost a worker comes last.
    """

    def __init__(self, chunks: Iterable[Sequence[Request]], num_workers: int) -> None:
        self._source = enumerate(chunks)
        self._num_ahead = AHEAD * num_workers
        self._chunks: dict[int, _Chunk] = {}
        self._num_tokens = 0
        self._has_more = True
        self._has_ended = False
        self._waiting: list[Piece] = []
        self._changed = threading.Condition()

    @property
    def has_work(self) -> bool:
        """Whether a chunk is not complete yet."""
        return self._has_more or bool(self._chunks)

    @property
    def num_waiting(self) -> int:
        """Pieces that nobody has taken yet."""
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
        self._chunks[number] = chunk = _Chunk(requests)
        self._num_tokens += chunk.held_tokens
        self.put_back(Piece(number, range(len(requests))))
        return True

    def take(self) -> tuple[Piece, list[Request]] | None:
        """Waits for a piece; None when there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended)
            if self._has_ended:
                return None
            piece = min(self._waiting, key=self._order)
            self._waiting.remove(piece)
            requests = self._chunks[piece.chunk].requests
        return piece, [requests[index] for index in piece.indices]

    def put_back(self, *pieces: Piece) -> None:
        """Lets the pieces be taken again, behind all others."""
        with self._changed:
            self._waiting += pieces
            self._changed.notify(len(pieces))

    def complete(self, piece: Piece, results: Sequence[Result | Lost]) -> list[Result | Lost] | None:
        """The results of the piece's chunk, where these are the last of them."""
        chunk = self._chunks[piece.chunk]
        chunk.results.update(zip(piece.indices, results, strict=True))
        if len(chunk.results) < len(chunk.requests):
            return None
        del self._chunks[piece.chunk]
        self._num_tokens -= chunk.held_tokens
        return [chunk.results[index] for index in range(len(chunk.requests))]

    def end(self) -> None:
        """Lets `take` return None from now on."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _order(self, piece: Piece) -> tuple[int, ...]:
        first = 0 if self._has_more else -self._chunks[piece.chunk].cost
        return (1 if piece.num_kills else 0, first, piece.chunk, piece.indices[0])
