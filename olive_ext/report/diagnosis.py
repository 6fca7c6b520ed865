"""What the plug-in `diagnose` finds of a comparison, and how that is said: whether one model gives the same numbers in
two places, but for rounding; and which of the stages between a checkpoint and the model as it runs lost something.

A stage is called innocent only where its KL is certainly a small part of the largest one's and the stage alone would
not be noticed: its interval stays within the nearest band of the verdict, and its own verdict is no loss. Plain data;
knows no comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from olive_ext.errors import counted
from olive_ext.report import numbers
from olive_ext.report.numbers import SAME_NATS, Z95, Number

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


StageName = Literal["conversion", "quantization"]

_SMALL_PART = 0.1
"""A stage is small where its interval ends below this part of the largest stage's mean KL."""


@dataclass(frozen=True)
class Stage:
    """One stage between reference and candidate; `finding` says where in the model it changed, if that is known."""

    name: StageName
    kl_mean: Number
    """In nats, between the stage's model and the one before it, over all tasks' positions."""

    kl_stderr: float | None
    top1_agreement: Number
    right_to_wrong: int = 0
    wrong_to_right: int = 0
    finding: str = ""
    top1_agreement_stderr: float | None = None
    is_loss: bool = False
    """Whether the verdict on this stage alone is a loss."""

    kl_margin: float | None = None
    """How far the 95 % interval of the mean KL reaches above it; None in old reports."""

    @property
    def is_exact(self) -> bool:
        """Whether only rounding is between the stage's two models."""
        return self.kl_mean < SAME_NATS

    @property
    def most_kl(self) -> float:
        """The upper end of the 95 % interval of the mean KL, in nats; infinite where a single document gives none."""
        if self.is_exact:
            return self.kl_mean
        if self.kl_margin is not None:
            return self.kl_mean + self.kl_margin
        return math.inf if self.kl_stderr is None else self.kl_mean + Z95 * self.kl_stderr

    @property
    def title(self) -> str:
        """The name within a sentence."""
        return "the conversion" if self.name == "conversion" else self.name

    @property
    def distance(self) -> str:
        """ "KL 0.820 nats"."""
        return f"KL {numbers.nats(self.kl_mean)} nats"


def stage_sentences(stages: Sequence[Stage], most_kl: float) -> Iterator[str]:
    """Which stages lost something, and where the conversion did; up to `most_kl` nats a stage alone is not noticed."""
    if len(stages) < 2:
        return
    ranked = sorted(stages, key=lambda stage: stage.kl_mean, reverse=True)
    least = min(most_kl, _SMALL_PART * ranked[0].kl_mean)
    guilty = [stage for stage in ranked if stage.is_loss or not (stage.is_exact or stage.most_kl <= least)]
    listed = ", ".join(f"{stage.title} {stage.distance}" for stage in ranked)
    innocent = [stage for stage in stages if stage not in guilty]
    if not all(math.isfinite(stage.kl_mean) for stage in stages):
        yield f"the stages cannot be separated: {listed}"
    elif not guilty:
        titles = " nor ".join(stage.title for stage in stages)
        yield f"neither {titles} lost anything: at most {ranked[0].distance}"
    elif innocent:
        (lost,), (kept,) = guilty, innocent
        yield f"{lost.title} lost it ({lost.distance}); {kept.title} did not ({kept.distance})"
    else:
        yield f"both stages lost: {listed}"
    yield from (f"{stage.title}: {stage.finding}" for stage in stages if stage.finding)
