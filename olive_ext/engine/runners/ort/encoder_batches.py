"""Which items an encoder takes in one run: those that wait for it and are alike, up to a number of rows of features.

As many as a power of two, so that shapes are few: 1, 2, 4, ... items. Knows no session.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from olive_ext.engine.media import MediaItem
from olive_ext.model.media_types import MediaEncoderSpec

Item = TypeVar("Item")


class EncoderBatches:
    """The items of requests that were admitted and are not encoded, in the order in which they came."""

    def __init__(self, spec: MediaEncoderSpec, max_rows: int = 1) -> None:
        """`max_rows`: of a run of several items; an item with more runs alone."""
        self.problem = spec.one_by_one
        """Why items run one by one; empty where several may."""

        self.is_tried = False
        """Whether two items together were what each of them is alone."""

        self._max_rows = max_rows
        self._waiting: dict[str, MediaItem] = {}

    def expect(self, items: Iterable[MediaItem]) -> None:
        """These will be wanted, and may be encoded beside others."""
        for item in items:
            self._waiting.setdefault(item.key, item)

    def forget(self) -> None:
        """Nothing is waiting."""
        self._waiting.clear()

    def take(self, item: MediaItem) -> list[MediaItem]:
        """The item that is wanted now, and those that may be encoded with it; they wait no more."""
        self._waiting.pop(item.key, None)
        alike = [one for one in self._waiting.values() if one.num_tokens == item.num_tokens]
        chosen = whole([item, *alike[: self.most(item) - 1]])
        for one in chosen[1:]:
            del self._waiting[one.key]
        return chosen

    def most(self, item: MediaItem) -> int:
        """Items like this one in a run at most."""
        return 1 if self.problem else _power(self._max_rows // item.num_tokens)


def whole(items: Sequence[Item]) -> list[Item]:
    """The first of them, as many as a power of two."""
    return list(items[: _power(len(items))])


def _power(number: int) -> int:
    """The largest power of two that is not above `number`; 1 at least."""
    return 1 << max(0, number.bit_length() - 1)
