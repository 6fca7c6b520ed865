"""Which documents to evaluate next: strata of how sure the reference is, and random draws from them, none twice. And
when enough are evaluated: a claim is certainly kept, certainly broken, or no document is left.

A document's value may be known within limits only: it has no answer, or its reference's record is a part of the whole.
Three runs of the same draws are then kept, with the least, the estimated and the greatest values: what is certain of
the first or the last is certain whatever the values are. Knows no model: it gives numbers of documents and takes their
values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from olive_ext.report.comparison import Status
from olive_ext.stats.compared_fields import FloatArray

IntArray = npt.NDArray[np.int64]

_MAX_LEVELS = 5
_LEAST_DOCUMENTS = 8
"""Documents of the least sure stratum, at least; smaller ones are used up before they teach anything."""


@dataclass(frozen=True)
class Population:
    """N documents, and what is estimated of all of them, the *population mean*: sum(sizes x values) / sum(sizes).

    The candidate's value of a document lies between two limits that the reference's own answers give. Its *share* is
    where it lies between them (0 to 1), its *weight* how far a whole share moves the mean, so that

        population mean = offset + sum over documents of weight x share

    with known offset and weights. Axes: N documents, H strata.
    """

    sizes_N: FloatArray
    """1 for answers; scored positions of a document, where positions are counted and documents are the clusters."""

    lows_N: FloatArray
    highs_N: FloatArray
    strata_N: IntArray
    expected_H: FloatArray
    """Mean share of a stratum, guessed before any of it is evaluated. Wrong guesses cost documents, never validity."""

    @cached_property
    def weights_N(self) -> FloatArray:
        """How far a whole share of each document moves the population mean, [N]."""
        weights: FloatArray = self.sizes_N * (self.highs_N - self.lows_N) / self.sizes_N.sum()
        return weights

    @cached_property
    def offset(self) -> float:
        """The population mean where every share is 0."""
        return float(self.sizes_N @ self.lows_N / self.sizes_N.sum())

    @cached_property
    def unseen_H(self) -> FloatArray:
        """Weight of each stratum before the first draw, [H]."""
        weights = np.bincount(self.strata_N, weights=self.weights_N, minlength=len(self.expected_H))
        return weights.astype(np.float64)

    @cached_property
    def least_weight(self) -> float:
        """The least weight of a document that counts. Those without weight (no position was scored) are never drawn."""
        return float(self.weights_N[self.weights_N > 0].min(initial=np.inf))

    def shares(self, documents: IntArray, values: npt.ArrayLike) -> FloatArray:
        """Shares [D]: where `values` [D] lie between the limits of `documents` [D], NaN for one that is;
        ValueError for one that lies elsewhere."""
        lows, highs = self.lows_N[documents], self.highs_N[documents]
        shares: FloatArray = (np.asarray(values, np.float64) - lows) / (highs - lows)
        if ((shares < 0) | (shares > 1)).any():
            raise ValueError("a value of a document lies outside the limits of its population")
        return shares

    def remove(self, unseen_RH: FloatArray, strata_R: IntArray, weights_R: FloatArray) -> None:
        """Takes one drawn document of each run out of `unseen_RH`, in place; what rounding leaves of the last is 0."""
        runs = np.arange(len(unseen_RH))
        left = unseen_RH[runs, strata_R] - weights_R
        unseen_RH[runs, strata_R] = np.where(left > self.least_weight / 2, left, 0)


def difference_population(reference: npt.ArrayLike, sureness: npt.ArrayLike) -> Population:
    """Candidate's value minus the reference's, per document; both lie in [0, 1], `reference` [N] is known.

    Where the reference is right (1) the candidate can only lose, where it is wrong (0) only gain. `sureness` [N] is how
    far the reference's answer is from being another one, in any unit that grows (nats between the right choice and the
    best wrong one, without the sign).
    """
    correct: FloatArray = np.asarray(reference, np.float64)
    strata, levels_H = _strata((correct < 0.5).astype(np.int64), sureness)
    flips = 0.5 ** (levels_H[strata] + 2)
    expected = correct + flips * (1 - 2 * correct)
    means: FloatArray = np.bincount(strata, weights=expected) / np.bincount(strata)
    return Population(np.ones(len(correct)), -correct, 1 - correct, strata, means)


def mean_population(num_positions: npt.ArrayLike, highest: float, sureness: npt.ArrayLike) -> Population:
    """Mean over positions of a quantity between 0 and `highest` (disagreement: 1; KL cut at `highest` nats).

    A document's value is the mean over its `num_positions` [N]; it is drawn with all its positions (a cluster), the
    larger the likelier. `sureness` [N]: of the reference over a document, e.g. minus its mean entropy.
    """
    sizes: FloatArray = np.asarray(num_positions, np.float64)
    strata, levels_H = _strata(np.zeros(len(sizes), np.int64), sureness)
    expected: FloatArray = np.power(0.5, levels_H + 2)
    return Population(sizes, np.zeros(len(sizes)), np.full(len(sizes), highest), strata, expected)


def draw_probabilities(unseen_RH: FloatArray, scores_RH: FloatArray) -> FloatArray:
    """Probabilities [R, H] of each stratum to be drawn from next. With standard deviations as scores this is Neyman's
    allocation, of what is left (1934, Journal of the Royal Statistical Society 97)."""
    products = unseen_RH * scores_RH
    totals = products.sum(axis=-1, keepdims=True)
    probabilities: FloatArray = products / np.where(totals > 0, totals, 1)  # nothing is left after the last draw
    return probabilities


def _strata(groups_N: IntArray, sureness: npt.ArrayLike) -> tuple[IntArray, IntArray]:
    """Stratum of each document, and level of each stratum: the surer half of a group is a stratum, half of what is left
    the next, ..., because differences gather where the reference is least sure. Level 0 is the least sure."""
    strata = np.zeros(len(groups_N), np.int64)
    levels: list[int] = []
    for group in np.unique(groups_N):
        (members,) = np.nonzero(groups_N == group)
        members = members[np.argsort(np.asarray(sureness)[members], kind="stable")]
        halves = [len(members) >> level for level in range(_MAX_LEVELS)]
        cuts = [0, *(half for half in reversed(halves[1:]) if half >= _LEAST_DOCUMENTS), len(members)]
        for level, (begin, end) in enumerate(itertools.pairwise(cuts)):
            strata[members[begin:end]] = len(levels)
            levels.append(level)
    return strata, np.array(levels, np.int64)


_LEAST_BATCH = 16
_ROUNDING = 1e-12
"""Above float64's errors, below all differences that matter: what lies this near the bound keeps the claim."""

_LEAST, _ESTIMATED, _GREATEST = range(3)
"""Runs of the same draws, by the values that they take the documents to have."""

_ERRORS = 3.0
"""Standard errors of estimated values that the greatest mean lies over the estimated one: what they leave out, 0.1 %,
is little beside a claim's 5 %."""


@dataclass(frozen=True)
class Claim:
    """The claim that the population mean is at least (`kept` "above") or at most ("below") `bound`.

    `distance`: from the bound to the mean of a candidate that equals its reference (for a loss within 0.01: 0.01).
    """

    bound: float
    kept: Literal["above", "below"]
    distance: float
    confidence: float = 0.95


class Sampler:
    """Draws documents in batches until the claim is decided; it can draw on until none is left.

    while sampler.asks:
        documents = sampler.next_batch()
        sampler.update(values of these documents, in this order)

    The draws are those of `seed` and the values: a run that is repeated or resumed draws the same documents in the
    same order. No document is drawn twice; those without weight are not drawn at all.

    The documents of each stratum have a random order. An order by E / weight with E exponential is the order of draws,
    one after the other, in proportion to weight from the rest (Efraimidis and Spirakis 2006, Information Processing
    Letters 97); with equal weights it is a shuffle.
    """

    def __init__(self, population: Population, claim: Claim, seed: int = 0) -> None:
        self._population = population
        self._claim = claim
        self._evidence = Evidence(population, claim.bound, claim.distance, num_runs=3)
        self._random = np.random.default_rng(seed)
        (counted,) = np.nonzero(population.weights_N > 0)
        self._keys_N = np.zeros(len(population.weights_N))
        self._keys_N[counted] = self._random.exponential(size=len(counted)) / population.weights_N[counted]
        ordered, strata = counted[np.argsort(self._keys_N[counted])], population.strata_N
        self._orders = [ordered[strata[ordered] == stratum] for stratum in range(len(population.expected_H))]
        self._positions = [0] * len(self._orders)
        self._num_documents = len(counted)
        self._pending: tuple[IntArray, FloatArray] | None = None
        self._drawn: list[int] = []
        self._values: list[float] = []
        self._variance = 0.0
        self._num_unknown = 0

    @property
    def asks(self) -> bool:
        """Whether the claim is not decided, and documents are left that may decide it."""
        return self.verdict == "unknown" and sum(self._positions) < self._num_documents

    def next_batch(self) -> IntArray:
        """Numbers [D] of the next documents, drawn without replacement, none where none is left: a tenth of those
        evaluated so far, as few are then evaluated in vain after the decisive one, and batches grow large."""
        count = max(_LEAST_BATCH, self._num_documents // 200, len(self._drawn) // 10)
        scores_RH = np.tile(self._evidence.scores()[_ESTIMATED], (3, 1))
        unseen_RH, drawn, weights_N = self._evidence.unseen_RH[[0]], [], self._population.weights_N
        for _ in range(min(count, self._num_documents - sum(self._positions))):
            stratum = self._random.choice(len(self._orders), p=draw_probabilities(unseen_RH, scores_RH[:1])[0])
            drawn.append(self._orders[stratum][self._positions[stratum]])
            self._positions[stratum] += 1
            self._population.remove(unseen_RH, np.array([stratum]), weights_N[drawn[-1:]])
        self._pending = np.array(drawn, np.int64), scores_RH
        return self._pending[0]

    def update(
        self, values: npt.ArrayLike, lows: npt.ArrayLike | None = None, variances: npt.ArrayLike | None = None
    ) -> None:
        """Takes the values of the last batch's documents, in its order; NaN where nothing is known of one. Estimates
        have `lows`, over which the values certainly are, and `variances`. ValueError where one is out of its limits."""
        assert self._pending is not None
        (documents, scores_RH), self._pending = self._pending, None
        shares = self._population.shares(documents, values)
        least = shares if lows is None else self._population.shares(documents, lows)
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
            self._evidence.observe(strata_R, np.minimum(shares_R, 1), weights_R, scores_RH)
        self._drawn += documents.tolist()
        self._values += np.asarray(values, np.float64).tolist()

    def _margin(self, weight: float, error: float) -> float:
        """The growth of the mean's error by a share with a standard `error`, as a share of its document."""
        before = math.sqrt(self._variance)
        self._variance += (weight * error) ** 2
        return _ERRORS * (math.sqrt(self._variance) - before) / weight

    def representation(self) -> dict[int, float]:
        """How many documents of its stratum each one drawn so far stands for, in the order of the draws.

        For every other metric of the same documents, which were not drawn alike: a mean with these weights is the
        stratified estimate (Cochran 1977, chapter 5A). A stratum of which nothing was drawn is not represented. They
        are 1 / (probability that its key is below that of the stratum's next document), which is unbiased for a fixed
        number of draws (Cohen and Kaplan 2007, PODC: rank conditioning), scaled to the stratum's known total weight:
        with equal weights all documents over those drawn, with none left 1.
        """
        represented: dict[int, float] = {}
        for order, position in zip(self._orders, self._positions, strict=True):
            drawn, weights = order[:position], self._population.weights_N
            next_key = self._keys_N[order[position]] if position < len(order) else np.inf
            counts = -1 / np.expm1(-weights[drawn] * next_key)
            if position:
                counts *= weights[order].sum() / (weights[drawn] @ counts)
            represented |= zip(drawn.tolist(), counts.tolist(), strict=True)
        return {document: represented[document] for document in self._drawn}

    @property
    def verdict(self) -> Status:
        """As of the last update. "ok" (the claim is kept) and "loss" are each wrong with probability at most 1 -
        confidence, whenever they are read. "unknown" where none is left says that what is not known of the documents
        would decide. What the documents prove by themselves goes before the evidence of bets."""
        bound, slack = self._claim.bound, _ROUNDING if self._claim.kept == "above" else -_ROUNDING
        (low, high), needed = self._logical_limits(), -math.log1p(-self._claim.confidence)
        is_above = self._evidence.peaks_SR[ABOVE, _LEAST] >= needed
        is_below = self._evidence.peaks_SR[BELOW, _GREATEST] >= needed
        if low + slack >= bound or (is_above and high + slack >= bound):
            return "ok" if self._claim.kept == "above" else "loss"
        if high + slack < bound or is_below:
            return "ok" if self._claim.kept == "below" else "loss"
        return "unknown"

    def decision(self) -> dict[str, Any]:
        """The facts of a `ClaimResult` as of the last update: `estimate` of the population mean within its interval,
        `low` to `high`; all three are equal where none is left and all are known."""
        logical, count, total = self._logical_limits(), len(self._drawn), self._num_documents
        if count == total:
            (low, high), estimate = logical, self._evidence.logical_limits(_ESTIMATED)[0]
        else:
            sides = (ABOVE, _LEAST), (BELOW, _GREATEST)
            low, high = (self._evidence.limit(*side, logical, self._claim.confidence) for side in sides)
            estimate = min(max(self._estimate((low + high) / 2), low), high)
        facts = {"verdict": self.verdict, "estimate": estimate, "low": low, "high": high}
        return facts | {"num_evaluated": count, "num_documents": total, "num_unknown": self._num_unknown}

    def _estimate(self, unknown: float) -> float:
        """The weighted mean of the known values, as of every other metric of these documents: where all are equal it is
        their value. Where the values decided when to stop, it can be off by a part of the interval's width."""
        counts, values = np.array([*self.representation().values()]), np.array(self._values)
        weights = np.where(np.isnan(values), 0, counts * self._population.sizes_N[self._drawn])
        return float(np.average(np.nan_to_num(values), weights=weights)) if weights.any() else unknown

    def _logical_limits(self) -> tuple[float, float]:
        return self._evidence.logical_limits(_LEAST)[0], self._evidence.logical_limits(_GREATEST)[1]


ABOVE, BELOW = 0, 1
"""Sides of the first axis S: evidence that the population mean is above the bound, and that it is below."""

SIGNS_S = np.array([1.0, -1.0])

_DISTANCES_K = np.array([0.5, 1.0, 3.0])
_PORTIONS_K = np.array([0.25, 0.5, 0.25])
"""Bets on a population mean that is 0.5, 1 and 3 distances from the bound, and their portions of the first wealth."""

_MIDDLE = 1
"""The bet that draws are allocated for."""

_MOST_LOST = 0.9
"""Portion of its wealth that a bet loses at most in one draw: the surest document may flip, too."""

_GUARDS = (0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Least scores of strata where any share can still be harmful. The least certain strata have at most 0.5."""

_LEAST_SPREAD = 0.03
"""Least score of every stratum: beliefs can be wrong about the harmless ones, too."""

_PRECISION = 1e-6
"""The precision of limits, in units of the population mean."""

_GUESSED = 2.0
"""Documents that the first guess of a stratum counts for."""


@dataclass(frozen=True)
class _Odds:
    """The distribution of Z before a draw."""

    centres_R: FloatArray
    """Its mean where the guesses are right."""

    ratios_RH: FloatArray
    """U_h / p_h: how far one whole share moves it."""

    variances_R: FloatArray
    stakes_SKR: FloatArray
    """Kelly's (1956) stakes for mean gains d with variance v, about d / (v + d^2), below what a draw can cost."""


class Evidence:
    """Evidence of the draws so far that the population mean is above `bound`, and that it is below. Draws come
    one at a time, in R independent runs at once: one in an evaluation, thousands in a simulation.

    **What is bet on.** Draw t picks stratum h with probability p_h and a document of it in proportion to weight; U_h is
    the stratum's weight not yet drawn, mu_h any guess of its mean share made before the draw. Then

        Z_t = offset + seen + sum_g U_g mu_g + (share - mu_h) U_h / p_h

    has the population mean as its mean, whatever was drawn before and however p and mu were chosen from that (Horvitz
    and Thompson 1952, for one draw; Des Raj 1956, JASA 51, for draws without replacement; mu is a control variate,
    which takes the differences between strata out of the variance). So for a population mean of at most m every product
    of

        1 + stake_t (Z_t - m),   0 <= stake_t < 1 / (m - least possible Z_t),   stake_t chosen before the draw

    is a non-negative supermartingale that starts at 1, and exceeds 1 / error ever with probability at most `error`
    (Ville 1939). That is the betting confidence sequence of Waudby-Smith and Ramdas (2024, JRSS B 86; without
    replacement: 2020, NeurIPS), with unequal probabilities that of Shekhar, Xu, Lipton, Liang and Ramdas (2023, UAI).
    One martingale covers all strata: which stratum comes next is drawn, too, so no stratum's mean is a nuisance
    parameter, and no level is divided among strata (compare Spertus and Stark 2022, for fixed allocations). Strata,
    probabilities and guesses decide how soon the wealth grows, never whether a limit holds: an adversary who knows the
    design, but not the seed, is covered.

    Bets are made for a population mean about `distance` away from the bound: the distance of a candidate that equals
    its reference. Another one costs draws, not validity.
    """

    def __init__(self, population: Population, bound: float, distance: float, num_runs: int = 1) -> None:
        self._population = population
        self._bound = bound
        self._gains_K1 = (distance * _DISTANCES_K)[:, None]
        strata = (num_runs, len(population.expected_H))
        self.unseen_RH = np.tile(population.unseen_H, (num_runs, 1))
        self.seen_R = np.zeros(num_runs)
        self._counts_RH, self._sums_RH, self._squares_RH = np.zeros(strata), np.zeros(strata), np.zeros(strata)
        self._log_wealth_SKR = np.zeros((len(SIGNS_S), len(_DISTANCES_K), num_runs))
        self.peaks_SR = np.zeros((len(SIGNS_S), num_runs))
        """Logarithm of the greatest wealth so far: bets may be stopped at it, so evidence is never lost again."""

        self.values_TR: list[FloatArray] = []
        """The Z_t of the draws."""

        self.stakes_TSKR: list[FloatArray] = []
        """What was bet on them."""

    def logical_limits(self, run: int = 0) -> tuple[float, float]:
        """Least and greatest population mean that is still possible, whatever the unseen documents of the run hold."""
        low = self._population.offset + float(self.seen_R[run])
        return low, low + float(self.unseen_RH[run].sum())

    def scores(self) -> FloatArray:
        """For `draw_probabilities`, [R, H]: believed standard deviations, and a guard against what is not believed.

        Stakes are bounded by the worst that a draw can bring, so a stratum where everything seems sure must be drawn
        often enough for stakes of a useful size, and sure documents that break are caught. The worst is a lost
        answer where the mean seems to lie above the bound, and a gained one where it seems to lie below. Of a few
        guards each run takes the one with which its wealth is expected to grow fastest.
        """
        means_RH, variances_RH = self._beliefs()
        spreads_RH = np.maximum(np.sqrt(variances_RH), _LEAST_SPREAD)
        is_above_R = self._odds(spreads_RH).centres_R >= self._bound
        harms_RH = np.where(is_above_R[:, None], means_RH, 1 - means_RH)
        candidates_GRH = [np.maximum(spreads_RH, guard * harms_RH) for guard in _GUARDS]
        odds_G, gain = [self._odds(scores_RH) for scores_RH in candidates_GRH], self._gains_K1[_MIDDLE]
        stakes_GSR = np.array([odds.stakes_SKR[:, _MIDDLE] for odds in odds_G])
        variances_G1R = np.array([odds.variances_R for odds in odds_G])[:, None]
        # Expected growth of the logarithm of the middle bet's wealth, to the second order.
        growths_GSR = stakes_GSR * gain - stakes_GSR**2 * (variances_G1R + gain**2) / 2
        best_R = np.where(is_above_R, growths_GSR[:, ABOVE], growths_GSR[:, BELOW]).argmax(axis=0)
        scores_RH: FloatArray = np.array(candidates_GRH)[best_R, np.arange(len(best_R))]
        return scores_RH

    def observe(self, strata_R: IntArray, shares_R: FloatArray, weights_R: FloatArray, scores_RH: FloatArray) -> None:
        """Settles the bets on one drawn document of each run, and learns from it.

        `scores_RH` are those it was drawn with, the others the document's. A share that is NaN is its stratum's mean.
        """
        cells = np.arange(len(strata_R)), strata_R
        odds, means_R = self._odds(scores_RH), self._beliefs()[0][cells]
        shares_R = np.where(np.isnan(shares_R), means_R, shares_R)
        values_R = odds.centres_R + (shares_R - means_R) * odds.ratios_RH[cells]
        self._log_wealth_SKR += np.log1p(SIGNS_S[:, None, None] * odds.stakes_SKR * (values_R - self._bound))
        self.peaks_SR = np.maximum(self.peaks_SR, mixed(self._log_wealth_SKR))
        self._counts_RH[cells] += 1
        self._sums_RH[cells] += shares_R
        self._squares_RH[cells] += shares_R**2
        self.seen_R += weights_R * shares_R
        self._population.remove(self.unseen_RH, strata_R, weights_R)
        self.values_TR.append(values_R)
        self.stakes_TSKR.append(odds.stakes_SKR)

    def limit(self, side: int, run: int, logical: tuple[float, float], confidence: float) -> float:
        """The lower (ABOVE) or the upper end (BELOW) of an interval that contains the population mean at every stopping
        time with probability `confidence`: the last rejected value on the way from an end of `logical`, the limits that
        hold without bets, to the bound.

        Values up to the bound are tested by the bets ABOVE only, values over it by the bets BELOW only, each at full
        level: the population mean is one of them, so no level is divided between the two ends. The price is that an
        interval on one side of the bound ends at the bound. From the bound on to where a side's evidence points away
        from, no bet can lose more than against the bound itself, for which the stakes were made, and wealth falls.
        """
        rejected, kept = logical[side], (min, max)[side](self._bound, logical[1 - side])
        if not self.values_TR or (kept - rejected) * SIGNS_S[side] <= 0:
            return rejected
        values_T, stakes_TK = np.array(self.values_TR)[:, run], np.array(self.stakes_TSKR)[:, side, :, run]

        def is_rejected(null: float) -> bool:
            gains_KT = SIGNS_S[side] * stakes_TK.T * (values_T - null)
            return bool(mixed(np.cumsum(np.log1p(gains_KT), axis=1)).max() >= -math.log1p(-confidence))

        if is_rejected(kept):
            return kept
        while abs(rejected - kept) > _PRECISION:
            middle = (rejected + kept) / 2
            rejected, kept = (middle, kept) if is_rejected(middle) else (rejected, middle)
        return rejected

    def _beliefs(self) -> tuple[FloatArray, FloatArray]:
        """Mean and variance of each stratum's shares, [R, H] each; the first guess is of shares that are 0 or 1."""
        counts_RH, expected_H = self._counts_RH + _GUESSED, self._population.expected_H
        means_RH = (self._sums_RH + _GUESSED * expected_H) / counts_RH
        squares_RH = (self._squares_RH + _GUESSED * expected_H) / counts_RH
        return means_RH, np.maximum(squares_RH - means_RH**2, 0)

    def _odds(self, scores_RH: FloatArray) -> _Odds:
        means_RH, variances_RH = self._beliefs()
        probabilities_RH = draw_probabilities(self.unseen_RH, scores_RH)
        ratios_RH = self.unseen_RH / np.where(probabilities_RH > 0, probabilities_RH, 1)
        centres_R = self._population.offset + self.seen_R + np.sum(self.unseen_RH * means_RH, axis=1)
        below_R = np.max(means_RH * ratios_RH, axis=1) - (centres_R - self._bound)
        above_R = np.max((1 - means_RH) * ratios_RH, axis=1) + (centres_R - self._bound)
        variances_R = np.sum(self.unseen_RH * ratios_RH * variances_RH, axis=1)
        # What bets on a mean above the bound can lose is how far below it Z can lie, and the other way round.
        most_SR = _MOST_LOST / np.maximum(np.stack([below_R, above_R]), 1e-300)
        kelly_KR = self._gains_K1 / (variances_R + self._gains_K1**2)
        return _Odds(centres_R, ratios_RH, variances_R, np.minimum(kelly_KR, most_SR[:, None]))


def mixed(log_wealth: FloatArray) -> FloatArray:
    """Logarithm [..., R] of the sum of the portions' wealths [..., K, R]: a mixture of martingales is one."""
    greatest = log_wealth.max(axis=-2, keepdims=True)
    wealth = np.sum(_PORTIONS_K[:, None] * np.exp(log_wealth - greatest), axis=-2)
    together: FloatArray = np.log(wealth) + greatest.squeeze(-2)
    return together
