"""Answers that were drawn until intervals were narrow, as a report tells them. Plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict


@dataclass(frozen=True)
class DrawnMean:
    """`avg@n` of one task by one filter, or how far it is above the reference's, over the documents that there are."""

    task: str
    filter: str
    value: float
    width: float
    """How far the interval over the drawing of answers goes to each side: not that over documents."""


@dataclass(frozen=True)
class Narrowed:
    """How many answers were drawn, and what they tell."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    looks: tuple[int, ...]
    """Answers to each document at each look; the last are those of the report."""

    most: int
    within: float
    confidence: float
    is_difference: bool
    means: tuple[DrawnMean, ...]

    @property
    def is_reached(self) -> bool:
        """Whether every interval is as narrow as asked."""
        return all(mean.width <= self.within for mean in self.means)

    def facts(self) -> Iterator[tuple[str, str]]:
        """The intervals by task and filter, and by the number of answers why there are no more."""
        what = f"avg@{self.looks[-1]}{' less the reference' if self.is_difference else ''}"
        for mean in self.means:
            value, sure = f"{mean.value:.4f} ± {mean.width:.4f}", f"{100 * self.confidence:g} %, over answers"
            yield f"{mean.task}, {mean.filter}", f"{what} on these documents {value} ({sure})"
        ended = "" if self.is_reached else f"not reached, {self.most} are the most; "
        looks = ", ".join(map(str, self.looks))
        yield f"{self.looks[-1]} answers to each document, for ± {self.within:g}", f"{ended}looks at {looks}"

    def sentences(self) -> Iterator[str]:
        """The facts, a sentence each."""
        return (f"{name}: {value}" for name, value in self.facts())
