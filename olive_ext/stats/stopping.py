"""When enough documents are evaluated: a claim is certainly kept, certainly broken, or no document is left.

A document's value may be known within limits only: it has no answer, or its reference's record is a part of the whole.
Three runs of the same draws are then kept, with the least, the estimated and the greatest values: what is certain of
the first or the last is certain whatever the values are. Knows no model: it gives numbers of documents and takes their
values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from olive_ext.stats.betting import ABOVE, BELOW, Bet, Evidence, joined, limits
from olive_ext.stats.sampling_design import FloatArray, IntArray, Population, Queues

_LEAST_BATCH = 16
_ROUNDING = 1e-12
"""Above float64's errors, below all differences that matter: what lies this near the bound keeps the claim."""

_LEAST, _ESTIMATED, _GREATEST = range(3)
"""Runs of the same draws, by the values that they take the documents to have."""

_ERRORS = 3.0
"""Standard errors of estimated values that the greatest mean lies over the estimated one: what they leave out, 0.1 %,
is little beside a claim's 5 %."""

Verdict = Literal["kept", "broken", "open"]


@dataclass(frozen=True)
class Claim:
    """That the population mean is at least (`kept` "above") or at most ("below") `bound`.

    `distance`: from the bound to the mean of a candidate that equals its reference (for a loss within 0.01: 0.01).
    """

    bound: float
    kept: Literal["above", "below"]
    distance: float
    confidence: float = 0.95


@dataclass(frozen=True)
class ClaimDecision:
    """`estimate` of the population mean within its interval, `low` to `high`; all three are equal where none is left
    and all are known.

    "kept" and "broken" are each wrong with probability at most 1 - confidence, whenever they are read. "open" where
    none is left says that what is not known of the documents would decide.
    """

    verdict: Verdict
    estimate: float
    low: float
    high: float
    num_evaluated: int
    num_documents: int
    num_unknown: int = 0
    """Of those evaluated, documents without a value."""


class Sampler:
    """Draws documents in batches until the claim is decided; it can draw on until none is left.

    while sampler.asks:
        documents = sampler.next_batch()
        sampler.update(values of these documents, in this order)

    The draws are those of `seed` and the values: a run that is repeated or resumed draws the same documents in the
    same order. No document is drawn twice; those without weight are not drawn at all.
    """

    def __init__(self, population: Population, claim: Claim, seed: int = 0) -> None:
        self._population = population
        self._claim = claim
        self._evidence = Evidence(population, claim.bound, claim.distance, num_runs=3)
        self._queues = Queues(population, np.random.default_rng(seed))
        self._num_documents = self._queues.num_left
        self._pending: tuple[IntArray, FloatArray] | None = None
        self._drawn: list[int] = []
        self._bets: list[Bet] = []
        self._variance = 0.0
        self._num_unknown = 0

    @property
    def asks(self) -> bool:
        """Whether the claim is not decided, and documents are left that may decide it."""
        return self.verdict == "open" and self._queues.num_left > 0

    def next_batch(self, count: int | None = None) -> IntArray:
        """Numbers [D] of the next documents; all that are left where `count` is as large.

        Without `count` as many as `batch_size` gives.
        """
        if self._pending is not None:
            raise ValueError("the values of the last batch are missing")
        if count is None:
            count = batch_size(self._num_documents, len(self._bets))
        scores_RH = np.tile(self._evidence.scores()[_ESTIMATED], (3, 1))
        documents = self._queues.draw(count, self._evidence.unseen_RH[0], scores_RH[0])
        self._pending = documents, scores_RH
        return documents

    def update(
        self, values: npt.ArrayLike, lows: npt.ArrayLike | None = None, variances: npt.ArrayLike | None = None
    ) -> None:
        """Takes the values of the last batch's documents, in its order; NaN where nothing is known of one. Estimates
        have `lows`, over which the values certainly are, and `variances`. ValueError where one is out of its limits."""
        if self._pending is None:
            raise ValueError("there is no batch that values are missing of")
        documents, scores_RH = self._pending
        shares, least = (
            self._population.shares(documents, given) for given in (values, values if lows is None else lows)
        )
        widths = (self._population.highs_N - self._population.lows_N)[documents]
        errors = np.sqrt(np.zeros(len(documents)) if variances is None else np.asarray(variances)) / widths
        for position, document in enumerate(documents):
            weights_R = np.full(3, self._population.weights_N[document])
            shares_R = np.array([least[position], shares[position], shares[position]])
            if np.isnan(shares_R).any():
                shares_R = np.array([0.0, np.nan, 1.0])
                self._num_unknown += 1
            else:
                shares_R[_GREATEST] += self._margin(float(weights_R[0]), float(errors[position]))
            strata_R = np.full(3, self._population.strata_N[document])
            self._bets.append(self._evidence.observe(strata_R, np.minimum(shares_R, 1), weights_R, scores_RH))
        self._drawn += documents.tolist()
        self._pending = None

    def _margin(self, weight: float, error: float) -> float:
        """What a share with a standard `error` adds to that of the mean so far, as a share of its document."""
        before = math.sqrt(self._variance)
        self._variance += (weight * error) ** 2
        return _ERRORS * (math.sqrt(self._variance) - before) / weight

    def representation(self) -> dict[int, float]:
        """How many documents of its stratum each one drawn so far stands for, in the order of the draws.

        For every other metric of the same documents, which were not drawn alike: a mean with these weights is the
        stratified estimate (Cochran 1977, chapter 5A). A stratum of which nothing was drawn is not represented.
        """
        counts = self._queues.representation()
        return {document: counts[document] for document in self._drawn}

    @property
    def verdict(self) -> Verdict:
        """As of the last update. What the documents prove by themselves goes before the evidence of bets."""
        bound, slack = self._claim.bound, _ROUNDING if self._claim.kept == "above" else -_ROUNDING
        (low, high), needed = self._logical_limits(), -math.log1p(-self._claim.confidence)
        is_above = self._evidence.peaks_SR[ABOVE, _LEAST] >= needed
        is_below = self._evidence.peaks_SR[BELOW, _GREATEST] >= needed
        if low + slack >= bound or (is_above and high + slack >= bound):
            return "kept" if self._claim.kept == "above" else "broken"
        if high + slack < bound or is_below:
            return "kept" if self._claim.kept == "below" else "broken"
        return "open"

    def decision(self) -> ClaimDecision:
        """As of the last update, with the interval."""
        logical, bound = self._logical_limits(), self._claim.bound
        count, total = len(self._bets), self._num_documents
        if count == total:
            estimate = self._evidence.logical_limits(_ESTIMATED)[0]
            return ClaimDecision(self.verdict, estimate, *logical, count, total, self._num_unknown)
        low, _ = limits(joined(self._bets, _LEAST), bound, logical, self._claim.confidence)
        _, high = limits(joined(self._bets, _GREATEST), bound, logical, self._claim.confidence)
        estimate = _estimate(joined(self._bets, _ESTIMATED).values_R, total) if count else (low + high) / 2
        return ClaimDecision(self.verdict, min(max(estimate, low), high), low, high, count, total, self._num_unknown)

    def _logical_limits(self) -> tuple[float, float]:
        return self._evidence.logical_limits(_LEAST)[0], self._evidence.logical_limits(_GREATEST)[1]


def batch_size(num_documents: int, num_evaluated: int) -> int:
    """A tenth of those evaluated so far: few are evaluated in vain behind the decisive one, and batches grow large."""
    return max(_LEAST_BATCH, num_documents // 200, num_evaluated // 10)


def _estimate(values_T: FloatArray, num_documents: int) -> float:
    """Weighted mean of the Z_t, each of which is unbiased (Des Raj 1956), as it is after any fixed number of draws.

    Draw t counts 1 / (N - t + 1)^2, because what can still vary shrinks with what is left; weights that depended on the
    values could bias it. Where the values decided when to stop it can be off by a part of the interval's width: the
    interval is what holds then.
    """
    left = num_documents - np.arange(len(values_T))
    return float(np.average(values_T, weights=1.0 / left**2))
