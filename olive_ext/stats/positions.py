"""Compared targets of a task as one growing array: 38 bytes a position, no objects. Knows no statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.stats.compared_fields import POSITION, STORED, Compared
from olive_ext.stats.token_classes import UNKNOWN

_FIRST_CAPACITY = 1024


class Positions:
    """Positions of one task, added request by request."""

    def __init__(self) -> None:
        self._rows: npt.NDArray[Any] = np.zeros(_FIRST_CAPACITY, POSITION)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> npt.NDArray[Any]:
        """A view of all positions so far, of type `POSITION`, in the order they were added."""
        return self._rows[: self._count]

    def add(
        self,
        document: int,
        logprobs: npt.ArrayLike,
        compared: Compared,
        *,
        first_position: int = 0,
        token_classes: npt.ArrayLike | None = None,
    ) -> None:
        """Takes the T consecutive targets of a request of `document`; `logprobs` [T] are the candidate's.

        `first_position` counts the tokens before the first target.
        """
        targets = np.asarray(logprobs, np.float32)
        rows = self._extend(len(targets))
        rows["document"] = document
        rows["position"] = first_position + np.arange(len(targets))
        rows["token_class"] = UNKNOWN if token_classes is None else token_classes
        rows["logprobs"] = targets
        for name in STORED:
            rows[name] = getattr(compared, name)

    def _extend(self, count: int) -> npt.NDArray[Any]:
        """`count` new rows to be filled; capacity doubles, so that adding is linear in all."""
        begin, self._count = self._count, self._count + count
        if self._count > len(self._rows):
            grown = np.zeros(max(self._count, 2 * len(self._rows)), POSITION)
            grown[:begin] = self._rows[:begin]
            self._rows = grown
        return self._rows[begin : self._count]


def joined(parts: Iterable[Positions]) -> Positions:
    """All positions of several tasks, their documents told apart."""
    whole, first_document = Positions(), 0
    for part in parts:
        rows = whole._extend(len(part))
        rows[:] = part.rows
        rows["document"] += first_document
        first_document += int(part.rows["document"].max(initial=-1)) + 1
    return whole
