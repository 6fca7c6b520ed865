"""Pictures and sounds of a request: which of its tokens stand for which item, and what an encoder is given of it.

An item's tokens are a run of placeholders that the item's features replace. Knows no picture, no file and no session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.model.media_types import Modality

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class MediaItem:
    """One picture or sound as an encoder takes it. Two are equal when their content and its preparation are."""

    modality: Modality
    key: str
    """Digest of what an encoder is given of it: of the content, and of how that is prepared."""

    num_tokens: int
    """Placeholders in the prompt, by the processor: the rows of features that the encoder must return."""

    placeholder: int
    """The token id in whose place the embedding graph puts a row of features."""

    load: Callable[[], Mapping[str, Array]] = field(compare=False, repr=False)
    """The processor's arrays of this item by name, made anew with each call: pixels of many pictures would not fit."""

    grid: tuple[int, int, int] | None = None
    """Features in time, height and width, for multimodal rotary positions; None where the processor names none."""


@dataclass(frozen=True)
class MediaRun:
    """An item, and the position of the first of its placeholders in the sequence."""

    start: int
    item: MediaItem

    @property
    def stop(self) -> int:
        """The position behind its last placeholder."""
        return self.start + self.item.num_tokens


Media = tuple[MediaRun, ...]
"""The items of a sequence, in order."""


@dataclass(frozen=True)
class FeatureRows:
    """Rows `first` to `stop` of an item's features: those that a step needs of it."""

    item: MediaItem
    first: int
    stop: int


def token_bucket(num_tokens: int) -> int:
    """The bucket of items with so many tokens: 8, 16, 32 and from there on a third to a half more each time; always
    larger, so that there is a tail to be filled."""
    return next(size for size in _sizes() if size > num_tokens)


def token_buckets(most: int) -> list[int]:
    """All buckets of items with up to `most` tokens."""
    return list(takewhile(lambda size: size <= token_bucket(most), _sizes()))


def _sizes() -> Iterator[int]:
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


def blocks(media: Media, whole: Container[int]) -> list[Media]:
    """The items in groups, each of which is fed in one step where its placeholder is among `whole`: those of them that
    touch are one group, because a mask that is made of token ids cannot tell them apart. Others are alone."""
    found: list[Media] = []
    for run in media:
        is_joined = found and found[-1][-1].stop == run.start and run.item.placeholder in whole
        if is_joined and found[-1][-1].item.placeholder == run.item.placeholder:
            found[-1] = (*found[-1], run)
        else:
            found.append((run,))
    return found


def whole_stop(media: Media, start: int, stop: int, whole: Container[int]) -> int:
    """Where a row that begins at position `start` ends so that it parts no item with a placeholder among `whole`: at
    `stop`, or where the items around it begin, or behind them where the row begins with these."""
    for block in blocks(media, whole):
        first, last = block[0], block[-1].stop
        if first.start < stop < last and first.item.placeholder in whole:
            return first.start if first.start > start else last
    return stop


def moved(media: Media, distance: int) -> Media:
    """The same items, each `distance` positions further on."""
    return tuple(replace(run, start=run.start + distance) for run in media)


def rows_within(media: Media, first: int, stop: int) -> list[tuple[int, FeatureRows]]:
    """(position, rows of features) for each item of which placeholders lie at positions `first` to `stop`."""
    found = []
    for run in media:
        begin, end = max(first, run.start), min(stop, run.stop)
        if begin < end:
            found.append((begin, FeatureRows(run.item, begin - run.start, end - run.start)))
    return found


def rotary_positions(media: Media, positions_N: Sequence[int] | Array) -> Array:
    """Time, height and width [3, N] of the tokens at `positions_N` of a sequence.

    Tokens of text have one number for all three. An item with a grid counts from the number behind the token before it,
    and the text behind it goes on from the largest of the item's numbers (Qwen2-VL, arXiv:2409.12191, section 2.1).
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
        behind = positions_N >= run.stop
        found_3N[:, behind] = positions_N[behind] + offset
    return found_3N
