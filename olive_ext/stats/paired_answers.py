"""Two models' answers to the same documents: the difference, its error, and the documents that flip.

Knows no task and no text of an answer.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from olive_ext.report.comparison import Outcome
from olive_ext.stats.compared_fields import FloatArray

DIFFERENCES = (0.05, 0.02, 0.01, 0.005)
"""Differences for which `Outcome.documents_needed` is always computed."""

NUM_DRAWS = 10_000
_ERROR, _POWER = 0.05, 0.8
_TAILS = (_ERROR / 2, 1 - _ERROR / 2)
_MOST_DRAWN = 1 << 22
_LEVELS, _HALVINGS = 1000, 40


def compare_outcomes(
    task: str,
    metric: str,
    filter_name: str,
    reference: npt.ArrayLike,
    candidate: npt.ArrayLike,
    higher_is_better: bool | None = True,
    matters: float = 1.0,
    *,
    whole: npt.ArrayLike = (),
    weights: npt.ArrayLike | None = None,
) -> Outcome:
    """One metric of one task from both models' values [D] for the same D documents, at least one.

    `matters` points are one of the differences for which the number of documents needed is reported.

    Where all values are 0 or 1, and it is known which is better, a document's answer is right or wrong, and flips are
    counted. Other metrics have no flips.

    Of drawn documents, `weights` [D] are the numbers of documents that each stands for, and `whole` the reference's
    values of all documents, whose mean is known; the difference is the weighted mean of those drawn. There is no
    p-value, and no number of documents needed, because the flips decided when to stop.
    """
    first: FloatArray = np.asarray(reference, np.float64)
    second: FloatArray = np.asarray(candidate, np.float64)
    is_drawn = weights is not None and len(first) < len(np.asarray(whole))
    everything: FloatArray = np.asarray(whole, np.float64) if is_drawn else first
    differences = second - first
    is_binary = higher_is_better is not None and bool(np.isin(np.concatenate([everything, second]), (0, 1)).all())
    lost, gained = flips(first, second, bool(higher_is_better)) if is_binary else (0, 0)
    reach = max(1.0, *(float(np.abs(each).max()) for each in (everything, second)))  # of one document's difference
    low, high, p = difference_interval(differences, reach, weights if is_drawn else None)
    mean, known = float(differences.mean()), float(everything.mean())
    if is_drawn:
        mean = float(np.average(differences, weights=np.asarray(weights, np.float64)))
    outcome = Outcome(
        task,
        metric,
        filter_name,
        num_documents=len(differences),
        reference=known,
        candidate=known + mean if is_drawn else float(second.mean()),
        difference=mean,
        low=low,
        high=high,
        right_to_wrong=lost,
        wrong_to_right=gained,
        mcnemar_p=1.0 if is_drawn else p,
        documents_needed={},
        higher_is_better=higher_is_better,
        is_binary=is_binary,
        num_population=len(everything) if is_drawn else None,
    )
    sizes = [] if is_drawn else dict.fromkeys([*DIFFERENCES, matters / outcome.unit])
    needed = {f"{size:g}": documents_needed(differences, size, is_binary) for size in sizes}
    return replace(outcome, documents_needed=needed)


def flips(reference: FloatArray, candidate: FloatArray, higher_is_better: bool = True) -> tuple[int, int]:
    """(right to wrong, wrong to right) of values that are 0 or 1."""
    down, up = int(np.sum(candidate < reference)), int(np.sum(candidate > reference))
    return (down, up) if higher_is_better else (up, down)


def mcnemar_p(right_to_wrong: int, wrong_to_right: int) -> float:
    """Exact two-sided p-value that a flip is as likely in either direction: a binomial test with 1/2 on the flips.

    McNemar 1947, Psychometrika 12; the exact form: Fagerland, Lydersen and Laake 2013, BMC Medical Research
    Methodology 13:91. 1 without any flips.
    """
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(right_to_wrong, wrong_to_right), right_to_wrong + wrong_to_right, 0.5)))


def difference_interval(
    differences: npt.ArrayLike, reach: float = 1.0, weights: npt.ArrayLike | None = None
) -> tuple[float, float, float]:
    """95 % interval of the mean of per-document `differences` [D], each within `reach` of zero; at least one. And the
    two-sided p-value of no change by the same limits, which is below 5 % exactly where the interval excludes zero.

    Gaffke's (2005) limits: the documents' shares of the population are drawn from a flat Dirichlet distribution
    (Rubin's bootstrap, 1981), and one more document, which nobody has seen, has the worst difference for the lower end
    and the best for the upper. So n documents without a change exclude a mean of 1 - 0.025^(1/n) (Clopper and Pearson
    1934), and the p-value of differences of -1, 0 and 1, whose limits are computed and not drawn, is that of McNemar's
    exact test. No law is assumed: each end is wrong in at most 2.5 % of cases for any differences within the reach,
    however few the documents and however rare the losses (docs/design/comparison.md has the simulation). `weights` [D]
    say how many documents each stands for, where they were drawn; the unseen one then stands for the most.
    """
    from scipy.special import betaincinv

    values: FloatArray = np.asarray(differences, np.float64)
    if not np.isfinite(values).all():
        return math.nan, math.nan, math.nan
    if weights is None and {*np.unique(values)} <= {-reach, 0.0, reach}:
        lost, won = (int(np.sum(values == end)) for end in (-reach, reach))
        same = len(values) - lost - won
        ends = reach * _least_change(lost, won, same), -reach * _least_change(won, lost, same)
        return *ends, mcnemar_p(lost, won)
    if weights is None and not np.ptp(values) > 0:
        unseen, size = float(betaincinv(1, len(values), _TAILS[1])), abs(float(values[0]))
        low, high = ((1 - unseen) * float(values[0]) + unseen * end for end in (-reach, reach))
        return low, high, min(1.0, 2 * (reach / (size + reach)) ** len(values))
    if weights is None:
        values, numbers = np.unique(values, return_counts=True)
    else:
        numbers = np.ones(len(values), np.int64)
    weights_D: FloatArray = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    random, parts = np.random.default_rng(0), []
    at_once = max(1, _MOST_DRAWN // len(values))
    for done in range(0, NUM_DRAWS, at_once):
        shape = min(at_once, NUM_DRAWS - done), len(values)
        shares = random.standard_exponential(shape) if numbers.max() == 1 else random.standard_gamma(numbers, shape)
        parts.append((shares @ (weights_D * values), shares @ weights_D))
    sums, totals = (np.concatenate(each) for each in zip(*parts, strict=True))
    unseen_shares = random.standard_exponential(NUM_DRAWS) * float(weights_D.max())
    lows, highs = (np.sort((sums + end * unseen_shares) / (totals + unseen_shares)) for end in (-reach, reach))
    beyond = int(_TAILS[0] * (NUM_DRAWS - 1))
    reached = min(int(np.sum(lows <= 0)), int(np.sum(highs >= 0)))
    return float(lows[beyond]), float(highs[-1 - beyond]), min(1.0, 2 * (1 + reached) / (1 + NUM_DRAWS))


def _least_change(lost: int, won: int, same: int) -> float:
    """The lower limit of the mean of so many differences of -1, 1 and 0: the documents that flip and the unseen one
    have a share that is a beta variable, of which the won ones have another. That the limit is zero has the probability
    of a binomial test, whatever the share is; so the share is summed over `_LEVELS` of its levels."""
    from scipy.special import betainc, betaincinv

    if not won:
        return -float(betaincinv(lost + 1, same, _TAILS[1])) if same else -1.0
    levels = (np.arange(_LEVELS) + 0.5) / _LEVELS
    shares = betaincinv(lost + won + 1, same, levels) if same else np.ones(1)
    low, high, middle = -1.0, 1.0, 0.0
    for _ in range(_HALVINGS):
        is_above = float(betainc(won, lost + 1, np.clip((1 + middle / shares) / 2, 0, 1)).mean()) > _TAILS[0]
        low, high = (low, middle) if is_above else (middle, high)
        middle = (low + high) / 2
    return middle


def documents_needed(differences: npt.ArrayLike, size: float, is_binary: bool) -> int | None:
    """Documents on which a two-sided test at the level `error` of 5 % finds a difference of `size` between two models
    with a `power` of 80 %, where per-document differences vary as `differences` [D] do.

    0/1 values with a share psi of flips (Connor 1987, Biometrics 43:207, eq. 3; after Miettinen 1968, Biometrics 24):

        n = (z_{1-error/2} sqrt(psi) + z_power sqrt(psi - size^2))^2 / size^2

    with psi at least `size`, because a difference is made of flips. Other values by the normal formula for a mean:
    n = ((z_{1-error/2} + z_power) sd / size)^2. None where no document differs: that says nothing of others.
    """
    from scipy.special import ndtri

    values: FloatArray = np.asarray(differences, np.float64)
    if not np.any(values):
        return None
    z_error, z_power = float(ndtri(1 - _ERROR / 2)), float(ndtri(_POWER))
    if is_binary:
        share = max(float(np.mean(values != 0)), size)
        needed = (z_error * math.sqrt(share) + z_power * math.sqrt(share - size**2)) ** 2 / size**2
    else:
        deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        needed = ((z_error + z_power) * deviation / size) ** 2
    return math.ceil(needed) if needed > 0 and math.isfinite(needed) else None
