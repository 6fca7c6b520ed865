"""What a session drives, and what it is to those who convert its requests and keep its answers.

`engine.Engine` runs requests in this process; workers do elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from olive_ext.engine.requests import Lost, Request, Result
from olive_ext.model import ResolvedModel
from olive_ext.text.encoder_decoder import Encoding
from olive_ext.text.placeholders import MediaText
from olive_ext.text.tokenizer import Tokenizer

OnChunk = Callable[[int, Sequence[Result | Lost]], None]
"""Called with the number of a chunk that is complete, and its results in the order of its requests."""


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
    def needs_chunks(self) -> bool:
        """Whether requests are cut into chunks, even where no answers are kept."""

    @property
    def at_work(self) -> str:
        """How many workers are open and were lost, for whoever waits; empty where there is nothing to say."""

    def run(self, requests: Sequence[Request], on_result: Callable[[int, Result], None]) -> object:
        """Runs all together, calling back as each is complete; `LostRequestsError` behind all where some are lost."""

    def run_chunks(self, chunks: Iterable[Sequence[Request]], done: OnChunk) -> None:
        """Runs each chunk by itself, in any order. `chunks` is read as there is room."""

    def run_continuous(self, items: Iterable[tuple[Hashable, Request] | None]) -> Iterator[tuple[Hashable, Result]]:
        """Runs what `items` yields while it does; None among them: nothing more is there for now."""

    def reset(self) -> None:
        """Forgets what is resident."""

    def release_memory(self) -> None:
        """Frees what has grown with use."""

    def describe(self) -> dict[str, Any]:
        """Facts of the execution."""

    def close(self) -> None:
        """Releases the model."""


class OpenModel(Protocol):
    """What conversions of requests and the journal of answers read of a session."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's texts."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end every generation."""

    @property
    def max_length(self) -> int:
        """Tokens that the model sees at once at most."""

    @property
    def encoding(self) -> Encoding | None:
        """How an encoder-decoder's sources are encoded."""

    @property
    def media(self) -> MediaText | None:
        """How pictures and sounds stand in texts."""

    @property
    def model(self) -> ResolvedModel | None:
        """The opened model, where it was resolved."""

    @property
    def reference(self) -> OpenModel | None:
        """The resident reference."""

    def describe_execution(self) -> dict[str, Any]:
        """Facts of the execution."""


@dataclass(frozen=True)
class RecordsElsewhere:
    """The records that a worker writes."""

    folder: Path

    def close(self) -> None:
        """The worker closes them."""
