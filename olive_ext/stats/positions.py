"""What two models say at every scored position, kept as one growing array: 38 bytes a position, no objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from olive_ext.stats.token_classes import UNKNOWN

FIELDS = np.dtype(
    [
        ("document", np.int32),
        ("position", np.int32),
        ("token_class", np.int8),
        ("kl", np.float32),
        ("kl_variance", np.float32),
        ("kl_lower", np.float32),
        ("reference_logprob", np.float32),
        ("logprob", np.float32),
        ("same_top", np.bool_),
        ("reference_top_logprob", np.float32),
        ("top_logprob", np.float32),
    ]
)
"""`document`: its number within the task; `position`: tokens before the target; `token_class`: an index into
`tokens.CLASSES`, or -1; `kl`, its sampling variance and lower bound in nats (squared for the variance);
log-probabilities in nats of the target under both models, and of the reference's most likely token under both."""

_FIRST_CAPACITY = 1024


class ComparedTargets(Protocol):
    """Both models' distributions at the T targets of one request, as the engine reports them; arrays [T]."""

    @property
    def kl(self) -> npt.ArrayLike: ...

    @property
    def kl_variance(self) -> npt.ArrayLike: ...

    @property
    def kl_lower(self) -> npt.ArrayLike: ...

    @property
    def reference_logprobs(self) -> npt.ArrayLike: ...

    @property
    def same_top(self) -> npt.ArrayLike: ...

    @property
    def reference_top_logprobs(self) -> npt.ArrayLike: ...

    @property
    def top_logprobs(self) -> npt.ArrayLike: ...


class Positions:
    """Positions of one task, added request by request."""

    def __init__(self) -> None:
        self._rows: npt.NDArray[Any] = np.zeros(_FIRST_CAPACITY, FIELDS)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> npt.NDArray[Any]:
        """A view of all positions so far, of type `FIELDS`, in the order they were added."""
        return self._rows[: self._count]

    def add(
        self,
        document: int,
        logprobs: npt.ArrayLike,
        compared: ComparedTargets,
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
        rows["kl"] = compared.kl
        rows["kl_variance"] = compared.kl_variance
        rows["kl_lower"] = compared.kl_lower
        rows["reference_logprob"] = compared.reference_logprobs
        rows["logprob"] = targets
        rows["same_top"] = compared.same_top
        rows["reference_top_logprob"] = compared.reference_top_logprobs
        rows["top_logprob"] = compared.top_logprobs

    def _extend(self, count: int) -> npt.NDArray[Any]:
        """`count` new rows to be filled; capacity doubles, so that adding is linear in all."""
        begin, self._count = self._count, self._count + count
        if self._count > len(self._rows):
            grown = np.zeros(max(self._count, 2 * len(self._rows)), FIELDS)
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
