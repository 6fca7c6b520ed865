"""Pictures and sounds of a request: which of its tokens stand for which item, and the encoder's inputs for each.

An item's tokens are a run of placeholders, which the item's features replace. Knows no picture, no file and no session.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from olive_ext.errors import LostItemError, MediaError, OliveExtError, TaskError
from olive_ext.model.types import Modality, SourceKind, TensorSpec

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Value = TypeVar("Value")


@dataclass(frozen=True)
class MediaItem:
    """One picture or sound, prepared for an encoder. Two are equal when content and preparation are."""

    modality: Modality
    key: str
    """Digest of the content and of how it is prepared."""

    num_tokens: int
    """Number of placeholders in the prompt, as the processor counts: the encoder must return as many rows."""

    placeholder: int
    """The id of the placeholder token, which the embedding graph replaces by features."""

    load: Callable[[], Arrays] = field(compare=False, repr=False)
    """Loads the processor's arrays of this item by name. They are not kept: many pictures would not fit."""

    grid: tuple[int, int, int] | None = None
    """Features in time, height and width, for multimodal rotary positions; None where the processor names none."""

    shown: str = field(default="an item", compare=False)
    """How an error names the item: its path where it has one, and its size."""

    def arrays(self) -> Arrays:
        """The arrays by name. Raises `LostItemError` where they cannot be loaded any more."""
        with self.or_lost():
            return self.load()

    @contextmanager
    def or_lost(self) -> Iterator[None]:
        """Turns a `TaskError` into a `LostItemError`: the item costs only the requests that have it."""
        try:
            yield
        except TaskError as error:
            raise LostItemError(str(error), self.key) from error


@dataclass(frozen=True)
class MediaRun:
    """An item, and the position of the first of its placeholders in the sequence."""

    start: int
    item: MediaItem

    @property
    def stop(self) -> int:
        """The position after its last placeholder."""
        return self.start + self.item.num_tokens


Media = tuple[MediaRun, ...]
"""The items of a sequence, in order."""


@dataclass(frozen=True)
class ItemLimit:
    """The most tokens of an item, which is fed in one step; None where steps grow with items."""

    tokens: int | None = None
    reason: str = ""
    """Which setting or device the limit comes from, and how it is raised."""

    is_strict: bool = False
    """Whether every shape is run beforehand. A model whose items are all above the limit is then refused when it is
    opened, and not at its first item, which a text does not have."""

    def problem(self, modality: Modality, num_tokens: int) -> str:
        """Why an item of so many tokens is too large; empty where it is not."""
        if self.tokens is None or num_tokens <= self.tokens:
            return ""
        return f"a {modality.kind} takes {num_tokens} tokens and is fed in one step: {self.reason}"

    def check(self, item: MediaItem) -> None:
        """Raises `MediaError` for an item of more tokens."""
        if problem := self.problem(item.modality, item.num_tokens):
            raise MediaError(problem)

    def both(self, other: ItemLimit) -> ItemLimit:
        """The lower of two limits."""
        limits = [limit for limit in (self, other) if limit.tokens is not None]
        return min(limits, key=lambda limit: limit.tokens or 0, default=self)


def token_bucket(num_tokens: int) -> int:
    """The bucket of an item of so many tokens, one of `growing_sizes`. It is always larger than the item, so that a
    tail is left to fill."""
    return next(size for size in growing_sizes() if size > num_tokens)


def token_buckets(most: int) -> list[int]:
    """All buckets of items with up to `most` tokens."""
    return list(takewhile(lambda size: size <= token_bucket(most), growing_sizes()))


def growing_sizes() -> Iterator[int]:
    """8, 16, 32, then a third to a half more each time, without an end."""
    yield from (8, 16, 32)
    size = 32
    while True:
        yield from (size * 3 // 2, size * 2)
        size *= 2


def media_key(media: Media) -> str:
    """Digest of the items and their places; empty where there are none."""
    if not media:
        return ""
    return hashlib.sha256(" ".join(f"{run.start}:{run.item.key}" for run in media).encode()).hexdigest()


def moved(media: Media, distance: int) -> Media:
    """The same items, each moved by `distance` positions."""
    return tuple(replace(run, start=run.start + distance) for run in media)


def runs_within(media: Media, first: int, stop: int) -> list[MediaRun]:
    """The items at positions `first` to `stop`. Neither bound may be inside an item."""
    inside = [run for run in media if run.start < stop and first < run.stop]
    assert all(first <= run.start and run.stop <= stop for run in inside), "a step cuts an item"
    return inside


def border(media: Media, position: int, group: int = 1) -> int:
    """The last multiple of `group` up to `position` that is not inside an item."""
    position -= position % group
    for run in reversed(media):
        if run.start < position < run.stop:
            position = run.start - run.start % group
    return position


def chunk_end(media: Media, start: int, stop: int, group: int = 1) -> int:
    """Where a chunk from `start` to `stop` ends so that it cuts no item: a multiple of `group` where there is one."""
    for end in (border(media, stop, group), border(media, stop)):
        if end > start:
            return end
    return next(run.stop for run in media if run.start == start)


def filled_up(parts: Sequence[Array]) -> Array:
    """The parts one after the other, padded with zeros to the longest on every other axis: [sum, ...]."""
    longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    filled = []
    for part in parts:
        more = [most - size for most, size in zip(longest, part.shape[1:], strict=True)]
        filled.append(np.pad(part, [(0, 0), *((0, size) for size in more)]))
    return np.concatenate(filled)


def rotary_positions(media: Media, positions_N: Sequence[int] | Array) -> Array:
    """Time, height and width [3, N] of the tokens at `positions_N` of a sequence.

    A token of text has one number for all three. An item with a grid counts from the number after the token before it,
    and the text after it goes on from the item's largest number (Qwen2-VL, arXiv:2409.12191, section 2.1).
    """
    positions_N = np.asarray(positions_N, np.int64)
    found_3N = np.stack([positions_N] * 3)
    offset = 0
    for run in media:
        if run.item.grid is None:
            continue
        times, height, width = run.item.grid
        begin = run.start + offset
        inside = (positions_N >= run.start) & (positions_N < run.stop)
        row = positions_N[inside] - run.start
        found_3N[:, inside] = begin + np.stack([row // (height * width), row // width % height, row % width])
        offset = begin + max(times, height, width) - run.stop
        after = positions_N >= run.stop
        found_3N[:, after] = positions_N[after] + offset
    return found_3N


class ItemStore(Generic[Value]):
    """The values of the items used last, by key: up to `budget` bytes, or a single larger one."""

    def __init__(self, budget: int, nbytes: Callable[[Value], int]) -> None:
        self.budget = budget
        self.num_bytes = 0
        self._nbytes = nbytes
        self._values: OrderedDict[str, Value] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Value | None:
        """The value, which now counts as the one used last."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: str, value: Value) -> int:
        """Keeps `value` as the one used last; returns how many others were dropped for it."""
        if key in self._values:
            self.num_bytes -= self._nbytes(self._values.pop(key))
        self._values[key] = value
        self.num_bytes += self._nbytes(value)
        before = len(self._values)
        while len(self._values) > 1 and self.num_bytes > self.budget:
            self.num_bytes -= self._nbytes(self._values.popitem(last=False)[1])
        return before - len(self._values)

    def clear(self) -> None:
        """Drops all values."""
        self._values.clear()
        self.num_bytes = 0


@dataclass(frozen=True)
class Source:
    """The input of an encoder: token ids [S] (integers), or features without a batch axis (floating point).

    Two are equal when their content is.
    """

    array: npt.NDArray[Any] = field(compare=False)
    key: str = field(init=False)
    """Digest of type, shape and content."""

    def __post_init__(self) -> None:
        content = np.ascontiguousarray(self.array)
        digest = hashlib.sha256(f"{content.dtype.str} {content.shape} ".encode())
        digest.update(content.data)
        object.__setattr__(self, "array", content)
        object.__setattr__(self, "key", digest.hexdigest())


def refuse_other_source(source: Source | None, kind: SourceKind, wanted: TensorSpec) -> None:
    """Raises `OliveExtError` for a source that an encoder with the input `wanted` [B, ...] does not take."""
    if source is None:
        raise OliveExtError(f"this model is an encoder-decoder: a request needs a source ({kind.value})")
    declared, shape = wanted.shape[1:], source.array.shape
    is_features = source.array.dtype.kind == "f"
    fits = len(shape) == len(declared) and all(
        size == length or not isinstance(length, int) for size, length in zip(shape, declared, strict=True)
    )
    if is_features is not (kind is SourceKind.FEATURES) or not fits or 0 in shape:
        raise OliveExtError(
            f"the source is {source.array.dtype} {list(shape)}; the encoder takes {kind.value} {list(declared)}"
        )
