"""Bounds of metrics: those that a report is held to, and the one that a sampled evaluation makes certain. Knows no
statistics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import StrictModel, Word, not_bool, word
from olive_ext.errors import ConfigError, ContradictionError

CertainMetric = Literal["accuracy_difference", "kl_mean", "top1_agreement"]

EQUAL: dict[CertainMetric, float] = {"accuracy_difference": 0.0, "kl_mean": 0.0, "top1_agreement": 1.0}
"""Each metric's value of a candidate that equals its reference."""

_ANSWERED = ("acc", "acc_norm", "acc_bytes", "exact_match")
_RANGES = {
    **dict.fromkeys(("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high"), (-1.0, 1.0)),
    **dict.fromkeys((*_ANSWERED, "top1_agreement", "top_probability_rms", "mcnemar_p"), (0.0, 1.0)),
    **dict.fromkeys(("kl_mean", "kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max"), (0.0, math.inf)),
    "perplexity_ratio": (0.0, math.inf),
}
"""Least and greatest values of metrics: shares, distances in nats and a ratio."""

Number = Annotated[float, BeforeValidator(not_bool), Field(allow_inf_nan=False)]
Distance = Annotated[float, BeforeValidator(not_bool), Field(gt=0, allow_inf_nan=False)]
Confidence = Annotated[float, BeforeValidator(not_bool), Field(ge=0.5, lt=1)]


class ClaimConfig(StrictModel):
    """A bound of a metric over all documents of all tasks; give one of `within`, `above` and `below`."""

    metric: Annotated[CertainMetric, BeforeValidator(word)] = "accuracy_difference"
    """"accuracy_difference" is the share of right answers less the reference's, "kl_mean" in nats, "top1_agreement" a
    share."""

    within: Distance | None = None
    """At most so much worse than a model that equals the reference: 0.01 of "accuracy_difference" is a loss of one
    point at most."""

    above: Number | None = None
    """The metric is at least this."""

    below: Number | None = None
    """The metric is at most this."""

    confidence: Confidence = 0.95
    """Probability that what is said to be certain of a model is true, whenever its evaluation stops. Of 20 candidates
    of a search one may be wrong at 0.95; 1 - 0.05 / 20 is 95 % of all of them."""

    @model_validator(mode="after")
    def _check_bound(self) -> Self:
        limits = [name for name in ("within", "above", "below") if getattr(self, name) is not None]
        if len(limits) != 1:
            raise ContradictionError(f"give one of 'within', 'above' and 'below', not {' and '.join(limits) or 'none'}")
        if not self.distance > 0:
            raise ContradictionError(
                "an unchanged model has this value, so that no number of documents decides: move it",
                limits[0],
                self.bound,
            )
        if self.metric != "kl_mean" and self.distance >= 1:
            raise ContradictionError("give less than 1: 0.01 is one point", limits[0], getattr(self, limits[0]))
        return self

    @property
    def side(self) -> Literal["above", "below"]:
        """The side of the bound on which the metric is to be."""
        is_above = self.above is not None or (self.within is not None and self.metric != "kl_mean")
        return "above" if is_above else "below"

    @property
    def bound(self) -> float:
        """The bound in the metric's own units."""
        if self.within is not None:
            return EQUAL[self.metric] + (self.within if self.side == "below" else -self.within)
        return next(bound for bound in (self.above, self.below) if bound is not None)

    @property
    def distance(self) -> float:
        """From the bound to the value of a candidate that equals its reference."""
        return abs(EQUAL[self.metric] - self.bound)


class Bound(StrictModel):
    """A number that a metric must not go beyond."""

    key: ClassVar[str] = "require"
    metric: Word
    """Name of the metric as a report has it, for instance "acc", "kl_mean", or a task's name that has one metric only
    ("size_on_disk")."""

    task: Word | None = None
    """The metric's task; "all" for a comparison with the reference over all tasks. May be left out where only one
    task has the metric, and for comparisons over all tasks."""

    filter: Word | None = None
    """lm-eval's filter, where the task has the metric once for each of several."""

    max: Number | None = None
    """Largest value that passes."""

    min: Number | None = None
    """Smallest value that passes."""

    @model_validator(mode="after")
    def _check_bounded(self) -> Self:
        if self.max is None and self.min is None:
            raise ContradictionError(f"give 'max' or 'min' for '{self.metric}'")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ContradictionError(f"'min' = {self.min:g} of '{self.metric}' is above 'max' = {self.max:g}", "min")
        name = self.metric.rpartition("/")[2].partition(",")[0]
        low, high = _RANGES.get(name, (-math.inf, math.inf))
        for key, bound, end in (("min", self.min, low), ("max", self.max, high)):
            if bound is not None and (not low <= bound <= high or (bound == end and name not in _ANSWERED)):
                hint = "" if math.isinf(high) else " (0.01 is one point)"
                problem = f"'{self.metric}' is from {low:g} to {high:g}{hint}: this decides nothing"
                raise ContradictionError(problem, key, bound)
        return self


class LossBound(Bound):
    """A bound of `fail_on_loss`, which is written in points of accuracy and per cent of a perplexity."""

    key: ClassVar[str] = "fail_on_loss"

    @classmethod
    def of(cls, loss: float) -> LossBound:
        """The bound on accuracy over all tasks."""
        return cls(metric="accuracy_difference", min=-loss / 100)


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([^<>=]+?)\s*([<>])=\s*([^<>=]+)", value)
    if match is None:
        raise ConfigError(f"give METRIC<=NUMBER or METRIC>=NUMBER, not {value!r}", "", value)
    return {"metric": match[1], "max" if match[2] == "<" else "min": match[3]}


WrittenBound = Annotated[
    Bound,
    BeforeValidator(_read, json_schema_input_type=str | Bound),
    Field(description='a mapping, or a text as "kl_mean<=0.01"'),
]


def implied_claim(bounds: Iterable[Bound]) -> ClaimConfig | None:
    """The claim that decides the only bound over all tasks on a metric that can be certain; None where there is none.

    Raises `ValueError` where several could be meant, or one has both ends.
    """
    candidates = [bound for bound in bounds if bound.metric in EQUAL and bound.task in (None, "all")]
    if len(candidates) > 1 or (candidates and None not in (candidates[0].min, candidates[0].max)):
        example = 'for instance {"metric": "kl_mean", "below": 0.01}'
        raise ContradictionError(f"'enough' decides one bound, and there are several: name it, {example}", "certain")
    if not candidates:
        return None
    return ClaimConfig.parse({"metric": candidates[0].metric, "above": candidates[0].min, "below": candidates[0].max})
