"""Statistics of margins (`olive_ext.report.margins`): how much they shrank, and how many answers will change.

Knows no task. Axes: N margins.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

LEVEL = 0.9
"""Of the intervals of predicted changes. Measured on documents that were held out: `docs/benchmarks/margins.py`."""

LEAST_DOCUMENTS = 20
"""Fewer tell next to nothing of others."""

_NOISE_SHARE = 0.95


def shrink_factor(
    reference: FloatArray, candidate: FloatArray, documents: npt.NDArray[np.int64], weights: FloatArray | None = None
) -> tuple[float, float, float]:
    """Sum of the candidate's margins [N] over that of the reference's, and its 95 % interval, infinite for a single
    document. `documents` [N] and `weights` as in `distances.clustered_mean`; NaN where all of the reference's are 0.

    A ratio of two means with documents as clusters (Cochran 1977, eq. 6.13), with Student's quantile. Least squares
    would go by the few largest margins.
    """
    from scipy.stats import t

    weights = np.ones(len(reference)) if weights is None else weights
    sums, others = (np.bincount(documents, weights * own) for own in (reference, candidate))
    if not sums.sum() > 0:
        return math.nan, math.nan, math.nan
    factor, count = float(others.sum() / sums.sum()), len(sums)
    if count < 2:
        return factor, -math.inf, math.inf
    stderr = math.sqrt(float(np.sum((others - factor * sums) ** 2)) * count / (count - 1)) / float(sums.sum())
    half = float(t.ppf(0.975, count - 1)) * stderr
    return factor, factor - half, factor + half


def noise(reference: FloatArray, candidate: FloatArray, shrink: float) -> float:
    """How far 95 % of the candidate's margins [N] lie at most from `shrink` times the reference's."""
    return float(np.quantile(np.abs(candidate - shrink * reference), _NOISE_SHARE))


class ChangeModel:
    """The probability that an answer changes, logistic in its margin: 1 / (1 + exp(-(a + b log(1 + margin / scale)))).

    `scale` is the root mean square of what margins moved by, so that it is nearly a line within the noise. Beyond it
    the logarithm keeps the sure answers, of which hardly any has changed, from deciding the slope: with the margin
    itself 28 % of 90 % intervals held where documents were drawn by their margins and 11 of 2,000 answers changed, with
    the logarithm all did (`docs/benchmarks/margins.py`, --plain). Jeffreys' prior (Firth 1993, Biometrika 80:27) gives
    an answer where none or all have changed, or all below some margin and none above.
    """

    def __init__(self, reference: npt.ArrayLike, candidate: npt.ArrayLike, changed: npt.ArrayLike) -> None:
        """From both models' margins [N] of the same answers, and whether each has changed; N is 1 or more."""
        from scipy.optimize import minimize

        margins, own, flags = (np.asarray(values, np.float64) for values in (reference, candidate, changed))
        shrink = own.sum() / margins.sum() if margins.sum() > 0 else 1.0
        self._scale = float(np.sqrt(np.mean((own - shrink * margins) ** 2))) or float(margins.mean()) or 1.0
        design_N2 = self._design(margins)

        def loss(theta: FloatArray) -> float:
            linear = design_N2 @ theta
            prior = float(np.linalg.slogdet(_information(design_N2, linear))[1])
            return float(np.logaddexp(0, linear).sum() - flags @ linear) - 0.5 * max(prior, -1e3)

        share = (flags.sum() + 0.5) / (len(flags) + 1)
        start = np.array([math.log(share / (1 - share)), 0.0])
        self._theta: FloatArray = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-7}).x
        self._covariance = np.linalg.pinv(_information(design_N2, design_N2 @ self._theta))

    def probabilities(self, margins: npt.ArrayLike) -> FloatArray:
        """That each of the answers [N] with these margins in the reference changes."""
        return _expit(self._design(np.asarray(margins, np.float64)) @ self._theta)

    def predict(self, margins: npt.ArrayLike, count: int | None = None) -> tuple[float, float, float]:
        """How many of N other answers change, of which the reference's margins are known, and its 90 % interval; of
        `count` answers with margins like these [N] where only so much is known.

        The number is beta-binomial, with the mean of the answers' probabilities and the variance of their sum plus
        that of the estimate (delta method): as skewed as a count of rare changes is.
        """
        from scipy.stats import betabinom

        design_N2 = self._design(np.asarray(margins, np.float64))
        chances = _expit(design_N2 @ self._theta)
        slopes = chances * (1 - chances)
        gradient = design_N2.T @ slopes
        mean, squares = float(chances.sum()), float((chances**2).sum())
        own, estimate = float(slopes.sum()), float(gradient @ self._covariance @ gradient)
        if count is not None:  # the margins are drawn, too: each change is as likely, and their mean has an error
            times = count / len(chances)
            estimate, mean = times**2 * (estimate + squares - mean**2 / len(chances)), times * mean
            own, squares = mean * (1 - mean / count), mean**2 / count
        trials = max(2, math.ceil(mean**2 / squares))
        share = mean / trials
        excess = min((own + estimate) / (trials * share * (1 - share)), 0.99 * trials)
        total = (trials - excess) / max(excess - 1, 1e-6)
        below = np.cumsum(betabinom.pmf(np.arange(trials + 1), trials, share * total, (1 - share) * total))
        low, high = np.searchsorted(below, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return mean, float(low), float(min(high, trials))

    def _design(self, margins: FloatArray) -> FloatArray:
        return np.stack([np.ones_like(margins), np.log1p(margins / self._scale)], axis=1)


def _information(design_N2: FloatArray, linear: FloatArray) -> FloatArray:
    chances = _expit(linear)
    matrix: FloatArray = (design_N2 * (chances * (1 - chances))[:, None]).T @ design_N2
    return matrix


def _expit(values: Any) -> FloatArray:
    from scipy.special import expit

    return np.asarray(expit(values), np.float64)
