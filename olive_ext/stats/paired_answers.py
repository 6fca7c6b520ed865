"""Two models' answers to the same documents: the difference, its error, and the documents that flip.

Knows no task and no text of an answer.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from olive_ext.report.comparison import Outcome
from olive_ext.stats.distances import clustered_mean

FloatArray = npt.NDArray[np.float64]

DIFFERENCES = (0.05, 0.02, 0.01, 0.005)
"""Differences for which `Outcome.documents_needed` is always computed."""

NUM_RESAMPLES = 10_000
_ERROR, _POWER, _CONFIDENCE = 0.05, 0.8, 0.95
_Z95 = 1.959964
_FEW_VALUES = 64
_CHUNK = 1 << 22


def compare_outcomes(
    task: str,
    metric: str,
    filter_name: str,
    reference: npt.ArrayLike,
    candidate: npt.ArrayLike,
    higher_is_better: bool = True,
    matters: float = 1.0,
) -> Outcome:
    """One metric of one task from both models' values [D] for the same D documents, at least one.

    `matters` points are one of the differences for which the documents needed are told.

    Where all values are 0 or 1 a document's answer is right (1, or 0 where lower is better) or wrong, and flips are
    counted. Other metrics have no flips, and their `mcnemar_p` is 1.
    """
    first: FloatArray = np.asarray(reference, np.float64)
    second: FloatArray = np.asarray(candidate, np.float64)
    differences = second - first
    is_binary = bool(np.isin((first, second), (0, 1)).all())
    lost, gained = flips(first, second, higher_is_better) if is_binary else (0, 0)
    low, high = difference_interval(differences, is_binary=is_binary, reach=_reach(first, second))
    outcome = Outcome(
        task=task,
        metric=metric,
        filter=filter_name,
        num_documents=len(differences),
        reference=float(first.mean()),
        candidate=float(second.mean()),
        difference=float(differences.mean()),
        low=low,
        high=high,
        right_to_wrong=lost,
        wrong_to_right=gained,
        mcnemar_p=mcnemar_p(lost, gained),
        documents_needed={},
        higher_is_better=higher_is_better,
        is_binary=is_binary,
    )
    sizes = dict.fromkeys([*DIFFERENCES, matters / outcome.unit])
    needed = {f"{size:g}": documents_needed(differences, size, is_binary) for size in sizes}
    return replace(outcome, documents_needed=needed)


def sampled_outcome(
    task: str,
    metric: str,
    filter_name: str,
    whole: npt.ArrayLike,
    reference: npt.ArrayLike,
    candidate: npt.ArrayLike,
    weights: npt.ArrayLike,
    higher_is_better: bool = True,
) -> Outcome:
    """As `compare_outcomes`, for all documents from D drawn ones, each of which stands for `weights` [D] documents.

    `whole` are the reference's values of all documents, whose mean is known; the difference is the weighted mean of
    those drawn (`sampled_difference`). There is no p-value, and no number of documents needed, because the flips
    decided when to stop.
    """
    everything, first, second, weights_D = (
        np.asarray(item, np.float64) for item in (whole, reference, candidate, weights)
    )
    differences = second - first
    is_binary = bool(np.isin(np.concatenate([everything, second]), (0, 1)).all())
    lost, gained = flips(first, second, higher_is_better) if is_binary else (0, 0)
    mean, low, high = sampled_difference(differences, weights_D, reach=_reach(everything, second))
    return Outcome(
        task=task,
        metric=metric,
        filter=filter_name,
        num_documents=len(differences),
        reference=float(everything.mean()),
        candidate=float(everything.mean()) + mean,
        difference=mean,
        low=low,
        high=high,
        right_to_wrong=lost,
        wrong_to_right=gained,
        mcnemar_p=1.0,
        documents_needed={},
        higher_is_better=higher_is_better,
        is_binary=is_binary,
        num_population=len(everything),
    )


def _reach(*values: FloatArray) -> float:
    """How far one document's values may lie apart: 1 for shares, else the largest value that was seen."""
    return max(1.0, *(float(np.abs(each).max()) for each in values))


def sampled_difference(differences: FloatArray, weights: FloatArray, *, reach: float) -> tuple[float, float, float]:
    """Weighted mean of drawn `differences` [D] with its 95 % normal interval.

    Undrawn documents may differ by `reach`: a direction that did not occur widens the interval, as if the rarest
    document had hidden one: n drawn without a change exclude shares over 1 - 0.025^(1/n) (Clopper and Pearson 1934).
    """
    mean, stderr = clustered_mean(differences, np.arange(len(differences)), weights)
    margin = _Z95 * (stderr or 0.0)
    unseen = reach * (1 - 0.025 ** (1 / len(differences))) * float(weights.max() / weights.mean())
    low = mean - (margin if np.any(differences < 0) else max(margin, unseen))
    high = mean + (margin if np.any(differences > 0) else max(margin, unseen))
    return mean, max(low, -reach), min(high, reach)


def flips(reference: FloatArray, candidate: FloatArray, higher_is_better: bool = True) -> tuple[int, int]:
    """(right to wrong, wrong to right) of values that are 0 or 1."""
    down, up = int(np.sum(candidate < reference)), int(np.sum(candidate > reference))
    return (down, up) if higher_is_better else (up, down)


def mcnemar_p(right_to_wrong: int, wrong_to_right: int) -> float:
    """Exact two-sided p-value that a flip is as likely in either direction: a binomial test with 1/2 on the flips.

    McNemar 1947, Psychometrika 12; the exact form: Fagerland, Lydersen and Laake 2013, BMC Medical Research
    Methodology 13:91. 1 without any flips.
    """
    from scipy.stats import binomtest

    both = right_to_wrong + wrong_to_right
    return float(binomtest(right_to_wrong, both, 0.5).pvalue) if both else 1.0


def difference_interval(
    differences: npt.ArrayLike,
    *,
    is_binary: bool,
    reach: float = 1.0,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> tuple[float, float]:
    """95 % interval of the mean of per-document `differences` [D]; documents are resampled with both models' values.

    Bias-corrected and accelerated bootstrap (BCa: Efron 1987, JASA 82; Efron and Tibshirani 1993, ch. 14), because
    differences of 0/1 values are skewed where flips of one direction prevail, and the percentile interval is then
    shifted. Ties with the estimate count half, as in scipy.stats.bootstrap.

    A direction that did not occur cannot be drawn: without any flip the bootstrap would claim certainty. For 0/1 values
    the interval therefore reaches at least as far as the exact binomial bounds of both directions' shares (Clopper and
    Pearson 1934) allow where one of them was not seen; with D documents and no flips that is about +-3.7 / D. Other
    values, which differ by `reach` at most, are widened by as large a share of such differences.
    """
    values: FloatArray = np.asarray(differences, np.float64)
    low, high = _bca_interval(values, seed, num_resamples)
    down, up = int(np.sum(values < 0)), int(np.sum(values > 0))
    (least_down, most_down), (least_up, most_up) = (_exact_interval(count, len(values)) for count in (down, up))
    if is_binary:
        low = low if down else min(low, least_up - most_down)
        high = high if up else max(high, most_up - least_down)
        return low, high
    return (low if down else max(low - reach * most_down, -reach)), (high if up else min(high + reach * most_up, reach))


def documents_needed(differences: npt.ArrayLike, size: float, is_binary: bool) -> int | None:
    """Documents on which a two-sided test at the level `error` of 5 % finds a difference of `size` between two models
    with a `power` of 80 %, where per-document differences vary as `differences` [D] do.

    0/1 values with a share psi of flips (Connor 1987, Biometrics 43:207, eq. 3; after Miettinen 1968, Biometrics 24):

        n = (z_{1-error/2} sqrt(psi) + z_power sqrt(psi - size^2))^2 / size^2

    with psi at least `size`, because a difference is made of flips. Other values by the normal formula for a mean:
    n = ((z_{1-error/2} + z_power) sd / size)^2. None where no document differs: that says nothing of others.
    """
    from scipy.stats import norm

    values: FloatArray = np.asarray(differences, np.float64)
    if not np.any(values):
        return None
    z_error, z_power = float(norm.ppf(1 - _ERROR / 2)), float(norm.ppf(_POWER))
    if is_binary:
        share = max(float(np.mean(values != 0)), size)
        needed = (z_error * math.sqrt(share) + z_power * math.sqrt(share - size**2)) ** 2 / size**2
    else:
        deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        needed = ((z_error + z_power) * deviation / size) ** 2
    return math.ceil(needed) if needed > 0 and math.isfinite(needed) else None


def _bca_interval(values: FloatArray, seed: int, num_resamples: int) -> tuple[float, float]:
    """z0 is from the share of resampled means below the estimate; the jackknife's acceleration of a mean is
    sum u^3 / (6 (sum u^2)^1.5) with u = value - mean."""
    from scipy.stats import norm

    mean = float(values.mean())
    if not np.ptp(values) > 0:  # all the same, or not finite
        return mean, mean
    centred = values - mean
    means = _resampled_means(values, np.random.default_rng(seed), num_resamples)
    below = (np.mean(means < mean) + np.mean(means <= mean)) / 2
    bias = norm.ppf(np.clip(below, 0.5 / num_resamples, 1 - 0.5 / num_resamples))
    acceleration = float(np.sum(centred**3) / (6 * np.sum(centred**2) ** 1.5))
    tails = bias + norm.ppf([(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    low, high = np.quantile(means, norm.cdf(bias + tails / (1 - acceleration * tails))).tolist()
    return low, high


def _resampled_means(values: FloatArray, random: np.random.Generator, num_resamples: int) -> FloatArray:
    """Means of `num_resamples` draws of len(values) values with replacement.

    Few different values (flips) are drawn as counts, a multinomial; others one by one, in bounded memory.
    """
    total = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= _FEW_VALUES:
        drawn = random.multinomial(total, counts / total, size=num_resamples)
        means: FloatArray = drawn @ distinct / total
        return means
    at_once = max(1, _CHUNK // total)
    sizes = [min(at_once, num_resamples - done) for done in range(0, num_resamples, at_once)]
    return np.concatenate([values[random.integers(0, total, (size, total))].mean(axis=1) for size in sizes])


def _exact_interval(count: int, total: int) -> tuple[float, float]:
    from scipy.stats import binomtest

    interval = binomtest(count, total).proportion_ci(_CONFIDENCE, method="exact")
    return float(interval.low), float(interval.high)
