"""When enough documents are evaluated: a claim is certainly kept, certainly broken, or no document is left.

Knows no model: it gives numbers of documents and takes their values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from olive_ext.stats.betting import Bet, Evidence, joined
from olive_ext.stats.confidence_sequence import limits
from olive_ext.stats.sampling_design import FloatArray, IntArray, Population, Queues

_LEAST_BATCH = 16
_ROUNDING = 1e-12
"""Above float64's errors, below all differences that matter: what lies this near the bound keeps the claim."""

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
class Decision:
    """`estimate` of the population mean within its interval, `low` to `high`; all three are equal where none is left.

    "kept" and "broken" are each wrong with probability at most 1 - confidence, whenever they are read.
    """

    verdict: Verdict
    estimate: float
    low: float
    high: float
    num_evaluated: int
    num_documents: int


class Sampler:
    """Draws documents in batches until the claim is decided; it can draw on until none is left.

    while sampler.verdict == "open":
        documents = sampler.next_batch()
        sampler.update(values of these documents, in this order)

    The draws are those of `seed` and the values: a run that is repeated or resumed draws the same documents in the
    same order. No document is drawn twice; those without weight are not drawn at all.
    """

    def __init__(self, population: Population, claim: Claim, seed: int = 0) -> None:
        self._population = population
        self._claim = claim
        self._evidence = Evidence(population, claim.bound, claim.distance)
        self._queues = Queues(population, np.random.default_rng(seed))
        self._num_documents = self._queues.num_left
        self._pending: tuple[IntArray, FloatArray] | None = None
        self._drawn: list[int] = []
        self._bets: list[Bet] = []

    def next_batch(self, count: int | None = None) -> IntArray:
        """Numbers of the next documents; all that are left where `count` is as large.

        Without `count` as many as `batch_size` gives.
        """
        if self._pending is not None:
            raise ValueError("the values of the last batch are missing")
        if count is None:
            count = batch_size(self._num_documents, len(self._bets))
        scores_RH = self._evidence.scores()
        documents = self._queues.draw(count, self._evidence.unseen_RH[0], scores_RH[0])
        self._pending = documents, scores_RH
        return documents

    def update(self, values: npt.ArrayLike) -> None:
        """Takes the values of the last batch's documents, in its order; ValueError where one is out of its limits."""
        if self._pending is None:
            raise ValueError("there is no batch that values are missing of")
        documents, scores_RH = self._pending
        shares = self._population.shares(documents, values)
        for position, document in enumerate(documents):
            one = slice(position, position + 1)
            strata, weights = self._population.strata_N[[document]], self._population.weights_N[[document]]
            self._bets.append(self._evidence.observe(strata, shares[one], weights, scores_RH))
        self._drawn += documents.tolist()
        self._pending = None

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
        low, high = self._evidence.logical_limits()
        is_above, is_below = self._evidence.peaks_SR[:, 0] >= -math.log1p(-self._claim.confidence)
        if low + slack >= bound or (is_above and high + slack >= bound):
            return "kept" if self._claim.kept == "above" else "broken"
        if high + slack < bound or is_below:
            return "kept" if self._claim.kept == "below" else "broken"
        return "open"

    def decision(self) -> Decision:
        """As of the last update, with the interval."""
        bets, (low, high) = joined(self._bets), self._evidence.logical_limits()
        num_evaluated = len(self._bets)
        if num_evaluated == self._num_documents:
            return Decision(self.verdict, low, low, low, num_evaluated, num_evaluated)
        low, high = limits(bets, self._claim.bound, (low, high), self._claim.confidence)
        estimate = _estimate(bets.values_R, self._num_documents) if num_evaluated else (low + high) / 2
        estimate = min(max(estimate, low), high)
        return Decision(self.verdict, estimate, low, high, num_evaluated, self._num_documents)


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
