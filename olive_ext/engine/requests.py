"""Requests and results of the engine: tokens in, log-probabilities and tokens out.

Knows no text, no tokenizer and no session. Axes: T targets of a request, G generated tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from olive_ext.errors import OliveExtError
from olive_ext.media.items import Media, Source
from olive_ext.model.files.package_config import Suppressed
from olive_ext.stats.compared_fields import COMPARED, Compared

TokenArray = npt.NDArray[np.int32]


class Ids(Sequence[int]):
    """Token ids from 0 to 2^31 - 1 as an array [N] that nobody changes. It is equal to a tuple of the same ids. Reading
    Python's integers one by one would cost more than all planning with them."""

    __slots__ = ("array",)

    def __init__(self, values: Iterable[int]) -> None:
        read = values.array if isinstance(values, Ids) else values
        if not isinstance(read, np.ndarray):
            read = (*read,)
            read = np.frombuffer(struct.pack(f"{len(read)}i", *read), np.int32)
        self.array: TokenArray = read

    @override
    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    @override
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        return (*self.array[place].tolist(),) if isinstance(place, slice) else self.array.item(place)

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        return bool(np.array_equal(self.array, other.array)) if isinstance(other, Ids) else (*self,) == other

    def __hash__(self) -> int:
        return hash((*self,))

    def __repr__(self) -> str:
        return repr((*self,))


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. `temperature` 0 is greedy and needs nothing else.

    Filters apply in Hugging Face's order: temperature, then top_k (0 = off), then top_p (1.0 = off).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0


EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beams:
    """A beam search as transformers defines it: the number of beams, how lengths are compared, when the search ends."""

    num_beams: int
    length_penalty: float = 1.0
    """A finished sequence's sum of log-probabilities is divided by its length to this power."""

    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1


@dataclass(frozen=True)
class ThinkingBudget:
    """If `num_tokens` generated tokens have not ended the reasoning, the tokens of `marker` are forced next."""

    num_tokens: int
    marker: tuple[int, ...]
    text: str = ""
    """The tokens that `is_over` looks for; empty where they are those of `marker`."""

    is_over: Callable[[Sequence[int]], bool] | None = field(default=None, compare=False, repr=False)
    """Gets all tokens generated so far after each one; True where the reasoning has ended."""

    def forced_after(self, generated: Sequence[int]) -> list[int] | None:
        """The tokens that are forced next: none where the reasoning has ended by itself; None while it goes on."""
        has_marker = tuple(generated[-len(self.marker) :]) == self.marker
        if has_marker if self.is_over is None else self.is_over(generated):
            return []
        return list(self.marker) if len(generated) >= self.num_tokens else None


@dataclass(frozen=True)
class Generation:
    """Tokens to generate after a request's own: at most `max_new_tokens`, ending on one of `stop_ids`.

    `is_finished`, where given, gets all tokens generated so far after each one and ends the sequence with True; with
    `beams`, each sequence has its own copy.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    is_finished: Callable[[Sequence[int]], bool] | None = field(default=None, compare=False)
    stops: tuple[str, ...] = ()
    """The texts that `is_finished` looks for; they stand for it where requests are compared or kept."""

    suppressed: Suppressed = field(default_factory=Suppressed)
    """The tokens that the model's own files suppress; its runner never generates them."""

    beams: Beams | None = None
    """A beam search; None decodes a single sequence."""

    thinking: ThinkingBudget | None = None

    @property
    def num_slots(self) -> int:
        """The number of sequences that are decoded at a time."""
        return 1 if self.beams is None else self.beams.num_beams


def source_key(source: Source | None) -> str:
    """The digest of a source; empty where there is none."""
    return "" if source is None else source.key


@dataclass(frozen=True)
class Request:
    """`tokens` (any integers are taken), of which the last `num_targets` are scored, and what to generate after them
    (nothing when None).

    `source` is for the encoder of an encoder-decoder, whose decoder is given `tokens`. `media` says which tokens are
    placeholders of pictures and sounds.
    """

    tokens: Ids
    num_targets: int = 0
    generation: Generation | None = None
    source: Source | None = None
    media: Media = ()
    records: tuple[int, ...] = ()
    """For each target, the number of the reference's record of the distribution that scores the target."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", Ids(self.tokens))
        if not 0 <= self.num_targets < max(1, len(self.tokens)):
            raise OliveExtError(
                f"a target needs a token before it: {self.num_targets} of {len(self.tokens)} are targets"
            )
        if self.media and self.media[-1].stop > len(self.tokens) - self.num_targets:
            raise OliveExtError("a picture or sound among the targets: only text can be scored")
        if self.generation is None and self.num_targets == 0:
            raise OliveExtError("a request asks for nothing: give targets or a generation", code="wrong_value")
        if self.generation is not None and (not self.tokens or self.generation.max_new_tokens < 1):
            raise OliveExtError("a generation needs at least one token before it and max_new_tokens of at least 1")

    @property
    def fed(self) -> TokenArray:
        """The tokens to compute: all but the last one, where nothing comes after it."""
        return self.tokens.array[:-1] if self.generation is None else self.tokens.array

    @property
    def num_positions(self) -> int:
        """The most positions that it occupies: the last token, scored or generated, is not fed."""
        return len(self.tokens.array) - 1 + (self.generation.max_new_tokens if self.generation is not None else 0)


class FinishReason(str, Enum):
    """Why a result is complete."""

    SCORED = "scored"
    STOP_ID = "stop_id"
    STOPPED = "stopped"
    LENGTH = "length"
    NON_FINITE = "non_finite"
    """The model's output was NaN or infinite, and such outputs are reported instead of stopping the run."""


Notes = npt.NDArray[np.void]


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence of a beam search. `tokens` are without the stop id. `score` is the sum of its
    log-probabilities, with that of the stop id, over its length to the power `length_penalty`."""

    tokens: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    stop_id: int | None = None


NUMBERS = 4
"""Raised with every change that corrects a model's numbers or changes the fields of a comparison: what was kept on disk
before is then not used any more."""


@dataclass(frozen=True)
class Result:
    """`logprobs[T]` in nats, `is_greedy[T]` (the target was the argmax), `tokens[G]` without the stop id."""

    logprobs: tuple[float, ...] = ()
    is_greedy: tuple[bool, ...] = ()
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.SCORED
    stop_id: int | None = None
    """The stop id that ended the generation, if one did."""

    notes: Notes | None = field(default=None, compare=False)
    """The runner's notes on each target: `COMPARED`[T] where there is a reference."""

    is_finite: bool = True
    """Whether the model's output is finite. False only where such outputs are reported."""

    hypotheses: tuple[Hypothesis, ...] = ()
    """The best sequences of a beam search, best first. `tokens` and the reason of the end are those of the first."""


@dataclass(frozen=True)
class Lost:
    """In place of a request's result: its workers were lost, or an encoder fails on an item of it."""

    reason: str


KeyedRequest = tuple[Any, Request]
"""A request, and the key under which its result comes back: anything that can be the key of a dict."""

KeyedResult = tuple[Any, Result | Lost]


def join_compared(requests: Sequence[Request], results: Sequence[Result]) -> Compared | None:
    """The compared fields of all requests' targets, one request after the other; None without a reference."""
    parts = [result.notes for result in results if result.notes is not None and result.notes.dtype == COMPARED]
    if len(parts) < len(requests) or not parts:
        return None
    notes_T = np.concatenate(parts)
    scored = [(request.tokens.array, len(request.tokens) - request.num_targets) for request in requests]
    targets = np.concatenate([ids_T[first:] for ids_T, first in scored]).astype(np.int64)
    positions = np.concatenate([np.arange(first, len(ids_T)) for ids_T, first in scored])
    fields: dict[str, Any] = {name: notes_T[name].copy() for name in COMPARED.names or ()}
    return Compared(**fields, targets=targets, positions=positions)


def integers(values: Sequence[int]) -> npt.NDArray[np.int64]:
    """A read-only array [N] of integers, packed into bytes first: half the time of numpy's reading one by one."""
    return np.frombuffer(struct.pack(f"{len(values)}q", *values), np.int64)


def common_prefix(left: TokenArray, right: TokenArray) -> int:
    """The number of leading tokens that are equal."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


@dataclass
class Counters:
    """Counts of requests, fed tokens and shared tokens since an engine was opened."""

    requests: int = 0
    tokens_naive: int = 0
    tokens_distinct: int = 0
    tokens_generated: int = 0
    tokens_fed: int = 0
    steps: int = 0
    idle_rows: int = 0
    steps_overlapped: int = 0
    """Overlapped steps: those that began before the step before them had been read."""

    rows_dropped: int = 0
    """Rows of overlapped steps whose sequence had already ended."""

    prefix_hits: int = 0
    tokens_reused: int = 0
    copies: int = 0
    moves: int = 0
    steps_halved: int = 0
    """How often the most tokens of a step were halved, because memory did not suffice."""

    preemptions: int = 0
    """Sequences that were preempted: they gave up their blocks of the KV cache, and were computed again."""

    non_finite: int = 0
    """Requests with an output that is NaN or infinite where a working model's is not."""
