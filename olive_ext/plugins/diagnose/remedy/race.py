"""Which of many quantities are the largest, by as few measurements as that takes.

Every quantity is measured on a first part of the documents, and those that may be among the largest on more, until it
is certain which these are. Knows quantities by their numbers, documents as columns. Axes: Q quantities, N documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats: TypeAlias = npt.NDArray[np.float64]

CONFIDENCE = 0.95

FIRST_SHARE = 32
"""All quantities are measured on this part of the documents (one of so many), and at least on `LEAST`."""

LEAST = 24
"""Documents from which on Student's quantiles at the chances of many pairs are near the normal distribution's."""

Measure: TypeAlias = Callable[[int, Sequence[int]], Floats]
"""From a quantity and the numbers of documents to the sum over each document's positions [N]."""

Progress: TypeAlias = Callable[[Sequence[int], int], Iterable[int]]
"""Yields the quantities that are measured on so many documents next, each when the one before it is measured."""


@dataclass(frozen=True)
class Estimate:
    """A mean over positions, with a 95 % interval of its own."""

    mean: float
    low: float
    high: float
    num_documents: int


class Race:
    """Measurements of Q quantities on documents in one random order; each quantity has been measured on the first of
    them."""

    def __init__(self, num_quantities: int, num_positions: npt.ArrayLike, measure: Measure, seed: int = 0) -> None:
        """`num_positions` [N]: the positions of each document, over which a mean is."""
        self._positions_N = np.asarray(num_positions, np.float64)
        self.order = np.random.default_rng(seed).permutation(len(self._positions_N))
        """The numbers of the documents [N], in the order in which they are measured."""

        self._positions_N = self._positions_N[self.order]
        self._sums_QN = np.zeros((num_quantities, len(self.order)))
        self._counts_Q = np.zeros(num_quantities, np.int64)
        self._measure = measure
        self.num_passes = 0.0
        """Measured positions, in passes over all documents."""

    def run(self, num_largest: int, progress: Progress = lambda quantities, many: quantities) -> frozenset[int]:
        """Measures until the `num_largest` largest quantities are certain, or every document is measured; the numbers
        of those that are certain to be among them.

        What is called certain is wrong in at most 5 % of races. A mistake calls a quantity certain that is none of the
        largest, or gives up one that is. It needs one that is not among the largest to be measured larger than one that
        is, so the chance is divided by the number of such pairs and of looks (Bonferroni).
        """
        looks = self._looks()
        contested = list(range(len(self._counts_Q)))
        for many in looks:
            for quantity in progress(contested, many):
                self.extend(quantity, many)
            certain, contested = self._standing(num_largest, len(looks))
            if not contested:
                break
        return certain

    def extend(self, quantity: int, many: int) -> None:
        """Measures a quantity on the first `many` documents, as far as it has not been measured."""
        start = int(self._counts_Q[quantity])
        if many > start:
            self._sums_QN[quantity, start:many] = self._measure(quantity, self.order[start:many].tolist())
            self._counts_Q[quantity] = many
            self.num_passes += float(self._positions_N[start:many].sum() / self._positions_N.sum())

    def estimate(self, quantity: int) -> Estimate:
        """The mean of a quantity on the documents that it was measured on."""
        many = int(self._counts_Q[quantity])
        return estimate(self._sums_QN[quantity, :many], self._positions_N[:many])

    def estimate_sum(self) -> Estimate:
        """The mean of the sum of all quantities, on the documents on which all were measured."""
        many = int(self._counts_Q.min())
        return estimate(self._sums_QN[:, :many].sum(0), self._positions_N[:many])

    def _looks(self) -> list[int]:
        total = len(self.order)
        looks = [min(total, max(LEAST, math.ceil(total / FIRST_SHARE)))]
        while looks[-1] < total:
            looks.append(min(total, 2 * looks[-1]))
        return looks

    def _standing(self, num_largest: int, num_looks: int) -> tuple[frozenset[int], list[int]]:
        """The quantities that are certain to be among the largest, and those that are still open: a quantity is out
        where `num_largest` others are larger than it, and certain where all but `num_largest` - 1 others are out or
        smaller than it."""
        count = len(self._counts_Q)
        if count <= num_largest:
            return frozenset(range(count)), []
        larger_QQ = self._larger((1 - CONFIDENCE) / num_looks / (num_largest * (count - num_largest)))
        is_out_Q = larger_QQ.sum(0) >= num_largest
        is_certain_Q = ~is_out_Q & ((larger_QQ | is_out_Q).sum(1) >= count - num_largest)
        return frozenset(np.flatnonzero(is_certain_Q).tolist()), np.flatnonzero(~is_certain_Q & ~is_out_Q).tolist()

    def _larger(self, alpha: float) -> npt.NDArray[np.bool_]:
        """[Q, Q]: where the first quantity of a pair is larger than the second with an error of at most `alpha`, by
        their differences on the documents that both have seen."""
        larger_QQ = np.zeros((len(self._counts_Q),) * 2, np.bool_)
        for many in np.unique(self._counts_Q).tolist():
            if many < 2:
                continue
            quantities = np.flatnonzero(self._counts_Q >= many)
            sums_QN, positions_N = self._sums_QN[quantities, :many], self._positions_N[:many]
            means_Q = sums_QN.sum(1) / positions_N.sum()
            residuals_QN = sums_QN - means_Q[:, None] * positions_N
            products_QQ = residuals_QN @ residuals_QN.T
            own_Q = np.diag(products_QQ)
            variance_QQ = np.maximum(own_Q[:, None] + own_Q - 2 * products_QQ, 0) * many / (many - 1)
            bound_QQ = np.sqrt(variance_QQ) / positions_N.sum() * stats.t.isf(alpha, many - 1)
            is_pair_QQ = np.minimum.outer(self._counts_Q[quantities], self._counts_Q[quantities]) == many
            difference_QQ = means_Q[:, None] - means_Q
            larger_QQ[np.ix_(quantities, quantities)] |= is_pair_QQ & (difference_QQ > bound_QQ) & (difference_QQ > 0)
        return larger_QQ


def estimate(sums_N: Floats, positions_N: Floats) -> Estimate:
    """The mean over positions of sums by document, with a 95 % interval; documents are drawn, so the mean is a
    ratio of two totals (Cochran 1977, Sampling Techniques, eq. 6.13). One document has no interval.

    Losses are skewed, a few documents have most of them: Student's interval holds in 86 % of draws of 30 documents of
    the quickstart's, and 93 % of 240. Without the skewness (Hall 1992, On the Removal of Skewness by Transformation)
    it is 94 and 95 % (docs/benchmarks/loss_intervals.py).
    """
    count, total = len(sums_N), float(positions_N.sum())
    mean = float(sums_N.sum()) / total
    if count < 2:
        return Estimate(mean, -math.inf, math.inf, count)
    residuals_N = sums_N - mean * positions_N
    squares = float(residuals_N @ residuals_N)
    stderr = math.sqrt(squares * count / (count - 1)) / total
    skewness = float((residuals_N**3).mean()) / (squares / count) ** 1.5 if squares else 0.0
    quantile = float(stats.t.isf((1 - CONFIDENCE) / 2, count - 1))
    low, high = (mean - stderr * _with_skewness(skewness, count, side) for side in (quantile, -quantile))
    return Estimate(mean, low, high, count)


def _with_skewness(skewness: float, count: int, quantile: float) -> float:
    """The quantile of a skewed mean's error, from that of a symmetric one's: the inverse of Hall's cubic."""
    if abs(skewness) < 1e-6:
        return quantile
    inner = 1 + skewness * (quantile / math.sqrt(count) - skewness / (6 * count))
    return math.sqrt(count) * 3 / skewness * (float(np.cbrt(inner)) - 1)
