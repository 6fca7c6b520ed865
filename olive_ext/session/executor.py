"""What a session drives: `engine.Engine` runs requests in this process, workers do elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from olive_ext.engine.requests import KeyedRequest, KeyedResult, Lost, Request, Result

ChunkResults = tuple[int, Sequence[Result | Lost]]
"""The number of a chunk, and its results in the order of its requests."""


class Executor(Protocol):
    """One open model, wherever it is. Not thread-safe: one call at a time."""

    @property
    def context_length(self) -> int:
        """Positions that a sequence may occupy at most."""

    @property
    def num_slots(self) -> int:
        """Sequences that are decoded together at most."""

    @property
    def counters(self) -> Any:
        """`engine.requests.Counters` since opening."""

    @property
    def at_work(self) -> str:
        """How many workers are open and were lost, for whoever waits; empty where there is nothing to say."""

    def run_slices(self, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        """The result of every request as it is complete, in any order. `slices` is read as there is room; what a slice
        holds is planned together."""

    def run_chunks(self, chunks: Iterable[Sequence[Request]]) -> Iterator[ChunkResults]:
        """Runs each chunk by itself, in any order. `chunks` is read as there is room; an empty one is complete at
        once."""

    def run_continuous(self, items: Iterable[KeyedRequest | None]) -> Iterator[KeyedResult]:
        """Runs what `items` yields while it does; None among them: nothing more is there for now."""

    def reset(self) -> None:
        """Forgets what is resident."""

    def release_memory(self) -> None:
        """Frees what has grown with use."""

    def describe(self) -> dict[str, Any]:
        """Facts of the execution."""

    def close(self) -> None:
        """Releases the model."""


@dataclass(frozen=True)
class RecordsElsewhere:
    """The records that a worker writes."""

    folder: Path

    def close(self) -> None:
        """The worker closes them."""
