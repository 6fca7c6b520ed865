"""The stages between a checkpoint and the model as it runs, and the sentence that says which of them lost something.

A stage is called innocent only where its KL is certainly a small part of the largest one's and the stage alone would
not be noticed: its interval stays within the nearest band of the verdict, and its own verdict is no loss. Knows no
comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from olive_ext.report import numbers
from olive_ext.report.numbers import SAME_NATS, Z95, Number

StageName = Literal["conversion", "quantization"]

_TITLES: dict[StageName, str] = {"conversion": "the conversion", "quantization": "quantization"}
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
        return _TITLES[self.name]

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
    innocent = [stage for stage in stages if stage not in guilty]
    if not all(math.isfinite(stage.kl_mean) for stage in stages):
        yield f"the stages cannot be separated: {_listed(ranked)}"
    elif not guilty:
        titles = " nor ".join(stage.title for stage in stages)
        yield f"neither {titles} lost anything: at most {ranked[0].distance}"
    elif innocent:
        (lost,), (kept,) = guilty, innocent
        yield f"{lost.title} lost it ({lost.distance}); {kept.title} did not ({kept.distance})"
    else:
        yield f"both stages lost: {_listed(ranked)}"
    yield from (f"{stage.title}: {stage.finding}" for stage in stages if stage.finding)


def _listed(stages: Sequence[Stage]) -> str:
    return ", ".join(f"{stage.title} {stage.distance}" for stage in stages)
