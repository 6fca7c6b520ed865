"""Which items an encoder takes in one run, up to a number of rows of features, and whether these, and what fills it up,
leave each other's features as they are: each trial is given a function that runs the encoder on items.

Patches with a grid are of pictures of any size. Sounds with a mask are filled up to the longest, unless shapes are to
be few. Others are alike, and as many as a power of two, so that shapes are few: 1, 2, 4, ... items.

One item does to another what nothing in the interface tells: attention across pictures, a norm over all of them, a
scale by the largest activation of the run (dynamic quantization), a branch for their number. Some of it shows only for
some numbers of items, sizes or contents. Knows no session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from olive_ext.engine.media.graphs import LateShapeError
from olive_ext.engine.media.items import MediaItem
from olive_ext.engine.media.shapes import MOST_GRIDS, Array, Arrays, EncoderShapes
from olive_ext.engine.runners.ort.ort_failures import FAILURES
from olive_ext.errors import first_line
from olive_ext.model.spec.media_types import MediaEncoderSpec

Item = TypeVar("Item")


class EncoderBatches:
    """The items of requests that were admitted and are not encoded, in the order in which they came."""

    def __init__(self, spec: MediaEncoderSpec, max_rows: int = 1, *, is_bucketed: bool = False) -> None:
        """`max_rows`: of a run of several items, padding too. `is_bucketed`: shapes are few."""
        self.problem = spec.one_by_one
        """Why items run one by one; empty where several may."""

        self.max_rows = max_rows
        self._has_grid = spec.grid is not None
        self._is_bucketed = is_bucketed
        self._takes_filled = spec.has_mask and not is_bucketed
        self._filled_problem = ""
        self._tried: dict[tuple[int, bool], range] = {}
        """The fewest to the most tokens together that were tried, by number of items and whether some are filled up."""

        self._waiting: dict[str, MediaItem] = {}

    def expect(self, items: Iterable[MediaItem]) -> None:
        """Adds items that will be wanted, and may be encoded beside others."""
        for item in items:
            self._waiting.setdefault(item.key, item)

    def forget(self) -> None:
        """Drops all items that wait."""
        self._waiting.clear()

    def take(self, item: MediaItem) -> list[MediaItem]:
        """The item that is wanted now, and waiting ones to be encoded with it, the most like it in length first."""
        self._waiting.pop(item.key, None)
        chosen = [item]
        if self.problem or self.max_rows <= item.num_tokens:
            return chosen
        for one in sorted(self._waiting.values(), key=lambda other: abs(other.num_tokens - item.num_tokens)):
            if self._has_room([*chosen, one]):
                chosen.append(one)
        chosen = self.whole(chosen)
        for one in chosen[1:]:
            del self._waiting[one.key]
        return chosen

    def whole(self, items: list[Item]) -> list[Item]:
        """The first of them, as many as a run may have."""
        return items if self._has_grid and self._is_bucketed else items[: _power(len(items))]

    def counts(self, item: MediaItem) -> Sequence[int]:
        """Numbers of items like this one in a run, where all such runs are to be made beforehand."""
        most = 1 if self.problem or self._has_grid else _power(self.max_rows // item.num_tokens)
        return [1 << power for power in range(most.bit_length())]

    def is_trial_due(self, items: Sequence[MediaItem], is_filled: bool) -> bool:
        """Whether such items are still to be held against each alone; if so, they count as tried."""
        tokens = sum(item.num_tokens for item in items)
        tried = self._tried.get((len(items), is_filled), range(tokens, tokens))
        if not self.takes(is_filled) or tokens in tried:
            return False
        self._tried[len(items), is_filled] = range(min(tried.start, tokens), max(tried.stop, tokens + 1))
        return True

    def note_trial(self, is_filled: bool, problem: str) -> None:
        """Items run one by one because of a `problem`; where only those that are filled up have it, these do."""
        if problem and is_filled:
            self._takes_filled, self._filled_problem = False, problem
        elif problem:
            self.problem = problem

    def takes(self, is_filled: bool) -> bool:
        """Whether such items may share a run."""
        return not self.problem and (self._takes_filled or not is_filled)

    @property
    def problems(self) -> Mapping[str, str]:
        """Why items do not share a run: all, or those of other lengths."""
        return {"one_by_one": self.problem, "filled_alone": self._filled_problem}

    def _has_room(self, items: Sequence[MediaItem]) -> bool:
        sizes = [item.num_tokens for item in items]
        if self._has_grid:
            return sum(sizes) <= self.max_rows and not (self._is_bucketed and len(items) > MOST_GRIDS)
        return len(items) * max(sizes) <= self.max_rows and (self._takes_filled or min(sizes) == max(sizes))


def _power(number: int) -> int:
    """The largest power of two that is not above `number`; 1 at least."""
    return 1 << max(0, number.bit_length() - 1)


_PROBLEMS: tuple[type[Exception], ...] = (*FAILURES, ValueError)
"""What several items or padding may end in: failures of the provider, and rows that do not fit (numpy's and ours)."""

Loaded = tuple[MediaItem, Arrays]
"""An item, and what an encoder is given of it."""

Encode = Callable[[Sequence[Loaded]], list[list[Array]]]
"""From items to the rows of each [N, H], of each output."""

ROUNDING = {8: 1e-5, 4: 1e-5, 2: 2e-3}
"""For the bytes of a number: the most that features may be off beside others, relative to the largest."""

SCALES = (1.0, 8.0, 1 / 64, 0.0)
"""Of the values of items that are tried together: what is taken of all of them is then none's own."""


def company_problem(items: Sequence[Loaded], encode: Encode) -> str:
    """What is wrong with so many items in a run; empty where nothing is. They are tried as they are, and in the other
    order with noise of unlike sizes in place of their contents."""
    noise = [(item, _noise(arrays, seed)) for seed, (item, arrays) in enumerate(items)]
    for tried in (list(items), noise[::-1]):
        try:
            together = encode(tried)
            alone = [encode([one])[0] for one in tried]
        except LateShapeError:
            raise
        except _PROBLEMS as error:
            return f"several together fail: {first_line(error)}"
        problems = map(_difference, alone, together)
        if problem := next(filter(None, problems), ""):
            return f"features of {len(items)} together {problem} those of each alone"
    return ""


def padding_problem(one: Loaded, shapes: EncoderShapes, encode: Encode) -> str:
    """What is wrong with an item in a bucket; empty where nothing is."""
    item, arrays = one
    for content in (arrays, *(_noise(arrays, seed) for seed in range(len(SCALES)))):
        shapes.note_trial("not yet tried")
        alone = encode([(item, content)])[0]
        shapes.note_trial("")
        try:
            padded = encode([(item, shapes.filled(content))])[0]
        except LateShapeError:
            raise
        except _PROBLEMS as error:
            return f"an item in a bucket fails: {first_line(error)}"
        if problem := _difference(alone, padded):
            return f"features of an item in a bucket {problem} those without"
    return ""


def _difference(expected: Sequence[Array], found: Sequence[Array]) -> str:
    """How far the features [N, H] of an item are from those expected, of each output; empty where that is rounding."""
    for other, own in zip(expected, found, strict=True):
        if own.shape != other.shape:
            return f"are {len(own)} rows, not {len(other)}"
        largest = np.abs(own.astype(np.float64) - other).max() / max(np.abs(other).max(), 1e-30)
        if not largest <= ROUNDING[own.dtype.itemsize]:
            return f"are {largest:.2g} of the largest off"
    return ""


def _noise(arrays: Arrays, seed: int) -> Arrays:
    """An item of the same shapes with noise for content; masks and positions stay."""
    rng, scale = np.random.default_rng(seed), SCALES[seed % len(SCALES)]
    return {
        name: (scale * rng.standard_normal(array.shape)).astype(array.dtype)
        if array.dtype.kind == "f" and "mask" not in name
        else array
        for name, array in arrays.items()
    }
