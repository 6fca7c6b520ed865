"""Which items an encoder takes in one run: those that wait for it, up to a number of rows of features.

Patches with a grid are of pictures of any size. Sounds with a mask are filled up to the longest, unless shapes are to
be few. Others are alike, and as many as a power of two, so that shapes are few: 1, 2, 4, ... items. Knows no session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from olive_ext.engine.media import MediaItem
from olive_ext.engine.runners.ort.encoder_arrays import Arrays, is_padded
from olive_ext.engine.runners.ort.encoder_shapes import MOST_GRIDS
from olive_ext.model.media_types import MediaEncoderSpec

Item = TypeVar("Item")


class EncoderBatches:
    """The items of requests that were admitted and are not encoded, in the order in which they came."""

    def __init__(self, spec: MediaEncoderSpec, max_rows: int = 1, *, is_bucketed: bool = False) -> None:
        """`max_rows`: of a run of several items, padding too; an item with more runs alone. `is_bucketed`: shapes are
        few."""
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
        """These will be wanted, and may be encoded beside others."""
        for item in items:
            self._waiting.setdefault(item.key, item)

    def forget(self) -> None:
        """Nothing is waiting."""
        self._waiting.clear()

    def take(self, item: MediaItem) -> list[MediaItem]:
        """The item that is wanted now, and those that may be encoded with it, the most like it in length first; they
        wait no more."""
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

    def goes_with(self, arrays: Arrays, first: Arrays) -> bool:
        """Whether what the encoder takes of an item may be joined to that of the first."""
        return self._takes_filled or not is_padded(arrays, first)

    def whole(self, items: list[Item]) -> list[Item]:
        """The first of them, as many as a run may have."""
        return items if self._has_any_number else items[: _power(len(items))]

    def counts(self, item: MediaItem) -> Sequence[int]:
        """Numbers of items like this one in a run, where all such runs are to be made beforehand."""
        most = 1 if self.problem or self._has_grid else _power(self.max_rows // item.num_tokens)
        return [1 << power for power in range(most.bit_length())]

    def is_trial_due(self, items: Sequence[MediaItem], is_filled: bool) -> bool:
        """Whether so many items, of so many tokens together, are still to be held against each of them alone; if so,
        they count as tried."""
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

    @property
    def _has_any_number(self) -> bool:
        return self._has_grid and self._is_bucketed

    def _has_room(self, items: Sequence[MediaItem]) -> bool:
        sizes = [item.num_tokens for item in items]
        if self._has_grid:
            return sum(sizes) <= self.max_rows and not (self._is_bucketed and len(items) > MOST_GRIDS)
        return len(items) * max(sizes) <= self.max_rows and (self._takes_filled or min(sizes) == max(sizes))


def _power(number: int) -> int:
    """The largest power of two that is not above `number`; 1 at least."""
    return 1 << max(0, number.bit_length() - 1)
