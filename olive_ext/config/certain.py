"""What a sampled evaluation makes certain: a bound of one metric of the comparison. Knows no statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Protocol

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import Strict, Word, not_bool, word

CertainMetric = Literal["accuracy_difference", "kl_mean", "top1_agreement"]

EQUAL: dict[CertainMetric, float] = {"accuracy_difference": 0.0, "kl_mean": 0.0, "top1_agreement": 1.0}
"""Each metric's value of a candidate that equals its reference."""

Number = Annotated[float, BeforeValidator(not_bool), Field(allow_inf_nan=False)]
Distance = Annotated[float, BeforeValidator(not_bool), Field(gt=0, allow_inf_nan=False)]


class Certain(Strict):
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

    confidence: Annotated[float, BeforeValidator(not_bool), Field(ge=0.5, lt=1)] = 0.95
    """Probability that what is said to be certain of a model is true, whenever its evaluation stops. Of 20 candidates
    of a search one may be wrong at 0.95; 1 - 0.05 / 20 is 95 % of all of them."""

    @model_validator(mode="after")
    def _check_bound(self) -> Self:
        given = [name for name in ("within", "above", "below") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of 'within', 'above' and 'below', not {' and '.join(given) or 'none'}")
        if not self.distance > 0:
            raise ValueError(
                f"'{given[0]}' = {self.bound:g} is the value of a model that equals the reference: no sample tells the "
                "two apart, give a bound that is not"
            )
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
        bound = self.above if self.above is not None else self.below
        assert bound is not None
        return bound

    @property
    def distance(self) -> float:
        """From the bound to the value of a candidate that equals its reference."""
        return abs(EQUAL[self.metric] - self.bound)


class BoundLike(Protocol):
    """An item of `require`."""

    @property
    def metric(self) -> Word: ...
    @property
    def task(self) -> Word | None: ...
    @property
    def min(self) -> float | None: ...
    @property
    def max(self) -> float | None: ...


def implied(bounds: Iterable[BoundLike]) -> Certain | None:
    """The claim that decides the only bound over all tasks on a metric that can be certain; None where there is none.

    Raises `ValueError` where several could be meant, or one has both ends.
    """
    found = [bound for bound in bounds if bound.metric in EQUAL and bound.task in (None, "all")]
    if len(found) > 1 or (found and None not in (found[0].min, found[0].max)):
        raise ValueError("'documents' = 'enough' decides one bound, 'require' has several: name one in 'certain'")
    return Certain.parse({"metric": found[0].metric, "above": found[0].min, "below": found[0].max}) if found else None
