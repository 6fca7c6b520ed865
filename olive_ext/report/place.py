"""Whether one model gives the same numbers in two places, but for rounding, and how that is said. Plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from olive_ext.errors import counted
from olive_ext.report import numbers
from olive_ext.report.numbers import Number

MOST_EXTRAPOLATED = 100
"""Beyond so many times the largest distance of noise, its extrapolated tail is no number worth showing."""

PlaceKind = Literal["same", "kernels", "different", "cannot_tell"]


@dataclass(frozen=True)
class Noise:
    """The noise of one place: distances, in nats, between log-probabilities of two ways to run the model there."""

    place: str
    form: str
    rms: Number
    largest: Number
    num_positions: int
    is_rounding: bool = False
    """Whether the inputs of its products were changed as rounding would, which gives the scale of kernels' rounding."""


@dataclass(frozen=True)
class FirstPosition:
    """Where two places first differ by more than noise; where noise explains all, the largest difference."""

    task: str
    document: int
    position: int
    """Tokens before the one whose log-probability differs."""

    distance: Number
    layer: int | None = None
    node: str = ""
    finding: str = ""
    """A sentence on the node, with operator, shapes and errors; or why it is not known; or that none differs."""

    repro: str = ""

    def __str__(self) -> str:
        where = f"position {self.position} of document {self.document} of {self.task}"
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{where}{layer}{f', node {self.node}' if self.node else ''}"


@dataclass(frozen=True)
class PlaceFinding:
    """The finding on a pair of places. Distances are of the log-probabilities of scored tokens, in nats."""

    kind: PlaceKind
    model: str
    """How the evaluated model was run, and the reference."""

    reference: str
    computed_in: str
    """The coarsest arithmetic of both."""

    rms: Number
    largest: Number
    num_positions: int
    noise: tuple[Noise, ...] = ()
    noise_limit: Number = 0.0
    """The limit that this model's own noise exceeds at one of these positions in at most 0.5 % of cases."""

    kernel_limit: Number = 0.0
    """The same of the rounding of kernels."""

    ratio: Number = 0.0
    """The ratio of the pair's distances to those of kernels' rounding, as the geometric mean over documents."""

    first: FirstPosition | None = None
    reason: str = ""
    """Why the kind cannot be decided."""

    @property
    def headline(self) -> str:
        """The verdict."""
        if self.kind == "different":
            return f"different: first at {self.first}"
        return {
            "same": "the same to rounding",
            "kernels": "rounding of the kernels",
            "cannot_tell": f"cannot tell whether the places differ: {self.reason}",
        }[self.kind]

    def evidence(self) -> Iterator[str]:
        """How far apart the places are, and the measured noise, one sentence each."""
        yield (
            f"{self.model} and {self.reference} are {_nats(self.rms)} apart (root mean square), at most "
            f"{_nats(self.largest)}, at {counted(self.num_positions, 'position')}"
        )
        if self.first is not None and self.first.finding:
            yield self.first.finding
        for title, is_rounding, limit in (
            ("this model's own noise", False, self.noise_limit),
            (f"rounding of kernels in {self.computed_in}", True, self.kernel_limit),
        ):
            measured = [one for one in self.noise if one.is_rounding is is_rounding]
            if measured:
                apart = max(one.rms for one in measured), max(one.largest for one in measured)
                is_known = limit <= MOST_EXTRAPOLATED * apart[1]
                tail = f"its tail may reach {_nats(limit)}" if is_known else "where its tail ends is not known"
                yield f"{title}: {_nats(apart[0])}, at most {_nats(apart[1])}; {tail}"


def _nats(value: float) -> str:
    return f"{numbers.nats(value)} nats"
