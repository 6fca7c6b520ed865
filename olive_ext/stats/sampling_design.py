"""Which documents to evaluate next: strata of how sure the reference is, and random draws from them, none twice.

Knows no model and no claim: it sees bounded values, their weights and their strata.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
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


def difference_population(reference: npt.ArrayLike, sureness: npt.ArrayLike | None = None) -> Population:
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


def mean_population(num_positions: npt.ArrayLike, highest: float, sureness: npt.ArrayLike | None = None) -> Population:
    """Mean over positions of a quantity between 0 and `highest` (disagreement: 1; KL cut at `highest` nats).

    A document's value is the mean over its `num_positions` [N]; it is drawn with all its positions (a cluster), the
    larger the likelier. `sureness` [N]: of the reference over a document, e.g. minus its mean entropy.
    """
    sizes: FloatArray = np.asarray(num_positions, np.float64)
    strata, levels_H = _strata(np.zeros(len(sizes), np.int64), sureness)
    expected: FloatArray = np.power(0.5, levels_H + 2)
    return Population(sizes, np.zeros(len(sizes)), np.full(len(sizes), highest), strata, expected)


class Queues:
    """The documents of each stratum in the random order in which they will be drawn.

    An order by E / weight with E exponential is the order of draws, one after the other, in proportion to weight from
    the rest (Efraimidis and Spirakis 2006, Information Processing Letters 97); with equal weights it is a shuffle.
    """

    def __init__(self, population: Population, random: np.random.Generator) -> None:
        self._population = population
        self._random = random
        (counted,) = np.nonzero(population.weights_N > 0)
        keys = random.exponential(size=len(counted)) / population.weights_N[counted]
        self._keys_N = np.zeros(len(population.weights_N))
        self._keys_N[counted] = keys
        ordered, strata = counted[np.argsort(keys)], population.strata_N
        self._orders = [ordered[strata[ordered] == stratum] for stratum in range(len(population.expected_H))]
        self._positions = [0] * len(self._orders)

    @property
    def num_left(self) -> int:
        """Documents that are not drawn yet."""
        return sum(map(len, self._orders)) - sum(self._positions)

    def draw(self, count: int, unseen_H: FloatArray, scores_H: FloatArray) -> IntArray:
        """Numbers [D] of the next `count` documents (fewer where fewer are left), drawn without replacement."""
        unseen_RH, drawn = unseen_H[None].copy(), []
        for _ in range(min(count, self.num_left)):
            stratum = self._random.choice(len(scores_H), p=draw_probabilities(unseen_RH, scores_H)[0])
            document = self._orders[stratum][self._positions[stratum]]
            self._positions[stratum] += 1
            drawn.append(document)
            self._population.remove(unseen_RH, np.array([stratum]), self._population.weights_N[[document]])
        return np.array(drawn, np.int64)

    def representation(self) -> dict[int, float]:
        """How many documents of its stratum each drawn one stands for.

        1 / (probability that its key is below that of the stratum's next document), which is unbiased for a fixed
        number of draws (Cohen and Kaplan 2007, PODC: rank conditioning), scaled to the stratum's known total weight:
        with equal weights all documents over those drawn, with none left 1.
        """
        represented: dict[int, float] = {}
        for order, position in zip(self._orders, self._positions, strict=True):
            drawn, weights = order[:position], self._population.weights_N
            if not position:
                continue
            next_key = self._keys_N[order[position]] if position < len(order) else np.inf
            counts = -1 / np.expm1(-weights[drawn] * next_key)
            counts *= weights[order].sum() / (weights[drawn] @ counts)
            represented |= zip(drawn.tolist(), counts.tolist(), strict=True)
        return represented


def draw_probabilities(unseen_RH: FloatArray, scores_RH: FloatArray) -> FloatArray:
    """Probabilities [R, H] of each stratum to be drawn from next. With standard deviations as scores this is Neyman's
    allocation, of what is left (1934, Journal of the Royal Statistical Society 97)."""
    products = unseen_RH * scores_RH
    totals = products.sum(axis=-1, keepdims=True)
    probabilities: FloatArray = products / np.where(totals > 0, totals, 1)  # nothing is left after the last draw
    return probabilities


def _strata(groups_N: IntArray, sureness: npt.ArrayLike | None) -> tuple[IntArray, IntArray]:
    """Stratum of each document, and level of each stratum: the surer half of a group is a stratum, half of what is left
    the next, ..., because differences gather where the reference is least sure. Level 0 is the least sure."""
    strata = np.zeros(len(groups_N), np.int64)
    levels: list[int] = []
    for group in np.unique(groups_N):
        (members,) = np.nonzero(groups_N == group)
        if sureness is None:
            cuts = [0, len(members)]
        else:
            members = members[np.argsort(np.asarray(sureness)[members], kind="stable")]
            halves = [len(members) >> level for level in range(_MAX_LEVELS)]
            cuts = [0, *(half for half in reversed(halves[1:]) if half >= _LEAST_DOCUMENTS), len(members)]
        for level, (begin, end) in enumerate(itertools.pairwise(cuts)):
            strata[members[begin:end]] = len(levels)
            levels.append(level)
    return strata, np.array(levels, np.int64)
