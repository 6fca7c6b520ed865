"""Bets against exact enumeration of all draws from small populations."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest

from olive_ext.stats.stopping import (
    ABOVE,
    BELOW,
    Bet,
    Evidence,
    Population,
    difference_population,
    draw_probabilities,
    joined,
    limits,
    mean_population,
)

SIGNS = {ABOVE: 1, BELOW: -1}


def small(name: str) -> tuple[Population, np.ndarray]:
    """A population of five or six documents and its shares."""
    if name == "answers":
        population = difference_population([1, 1, 1, 0, 0])
        return population, np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    if name == "clusters":
        return mean_population([1, 2, 5, 3, 1], highest=0.5), np.array([0.1, 0.9, 0.0, 0.3, 1.0])
    strata, expected = np.array([0, 0, 1, 1, 2]), np.array([0.9, 0.2, 0.5])
    return Population(np.ones(5), np.zeros(5), np.ones(5), strata, expected), np.array([1.0, 1.0, 0.0, 0.0, 0.4])


def wanted(population: Population, shares: np.ndarray) -> float:
    return population.offset + float(population.weights_N @ shares)


def all_paths(
    population: Population, shares: np.ndarray, evidence: Evidence, done: tuple[int, ...] = (), chance: float = 1.0
) -> Iterator[tuple[float, list[Bet]]]:
    """(probability, bets) of every order in which the documents can be drawn, scores anew before each draw."""
    scores = evidence.scores()
    probabilities = draw_probabilities(evidence.unseen_RH, scores)[0] if len(done) < len(shares) else []
    if len(done) == len(shares):
        yield chance, []
    for document in set(range(len(shares))) - set(done):
        stratum, weight = population.strata_N[document], population.weights_N[document]
        within = weight / evidence.unseen_RH[0, stratum]
        after = copy.deepcopy(evidence)
        bet = after.observe(np.array([stratum]), shares[[document]], population.weights_N[[document]], scores)
        below = all_paths(population, shares, after, (*done, document), chance * probabilities[stratum] * within)
        yield from ((one, [bet, *rest]) for one, rest in below)


@pytest.mark.parametrize(
    ("name", "shift"), [("answers", 0.0), ("clusters", 0.0), ("guesses", 0.0), ("clusters", -0.1), ("answers", 0.07)]
)
def test_every_draw_is_unbiased_and_wealth_at_the_truth_is_a_martingale(name: str, shift: float) -> None:
    population, shares = small(name)
    truth = wanted(population, shares)
    bound = truth + shift
    paths = list(all_paths(population, shares, Evidence(population, bound, 0.1)))
    chances = np.array([chance for chance, _ in paths])
    assert chances.sum() == pytest.approx(1)
    bets = [joined(path) for _, path in paths]
    values = np.array([bet.values_R for bet in bets])
    assert chances @ values == pytest.approx(np.full(len(shares), truth))  # Z_t of every t
    for side in (ABOVE,) if shift > 0 else (BELOW,) if shift < 0 else (ABOVE, BELOW):
        gains = np.array([1 + SIGNS[side] * bet.stakes_SKR[side] * (bet.values_R - truth) for bet in bets])
        assert gains.min() > 0
        wealth = gains.cumprod(axis=2)
        assert np.tensordot(chances, wealth, axes=1) == pytest.approx(np.ones(wealth.shape[1:]))


@pytest.mark.parametrize(
    "name", ["clusters", *(pytest.param(name, marks=pytest.mark.long) for name in ("answers", "guesses"))]
)
def test_probability_of_ever_rejecting_the_truth_is_exactly_below_the_error(name: str) -> None:
    population, shares = small(name)
    truth = wanted(population, shares)
    for bound in (truth, truth - 0.15):
        missed = 0.0
        for chance, path in all_paths(population, shares, Evidence(population, bound, 0.3)):
            low, high = limits(joined(path), bound, (-1, 1), 0.6)  # what was ever rejected stays so
            missed += chance * (low > truth + 1e-9 or high < truth - 1e-9)
        assert missed <= 0.4


def test_many_runs_at_once_are_single_runs() -> None:
    population, shares = small("answers")
    orders = np.array([[0, 3, 1, 4], [2, 1, 4, 0]])
    together = Evidence(population, -0.1, 0.1, num_runs=2)
    alone = [Evidence(population, -0.1, 0.1) for _ in orders]
    for documents in orders.T:
        scores = together.scores()
        where = population.strata_N[documents], shares[documents], population.weights_N[documents]
        values = together.observe(*where, scores).values_R
        for run, evidence in enumerate(alone):
            one = evidence.observe(*(array[[run]] for array in where), evidence.scores())
            assert one.values_R[0] == values[run]
    assert together.peaks_SR.tolist() == np.concatenate([one.peaks_SR for one in alone], axis=1).tolist()


def test_guard_draws_sure_strata_often_enough_for_the_stakes() -> None:
    population = difference_population(np.ones(1000), np.arange(1000.0))
    evidence = Evidence(population, -0.01, 0.01)
    for document in range(0, 1000, 10):  # nothing flips: all strata are believed to be sure
        stratum = population.strata_N[[document]]
        evidence.observe(stratum, np.ones(1), np.full(1, 0.001), evidence.scores())
    assert evidence.scores().min() >= 0.05


def drawn_bets(bound: float, num_draws: int = 150) -> tuple[Bet, Evidence]:
    """Bets of one run on answers without any loss, drawn at random."""
    random = np.random.default_rng(3)
    reference = (random.random(1000) < 0.7).astype(float)
    population = difference_population(reference, random.random(1000))
    evidence, bets = Evidence(population, bound, 0.05), []
    for document in random.permutation(1000)[:num_draws]:
        where = population.strata_N[[document]], reference[[document]], population.weights_N[[document]]
        bets.append(evidence.observe(*where, population.unseen_H[None] * 0 + 1))
    return joined(bets), evidence


def test_limits_are_those_of_a_grid() -> None:
    bets, evidence = drawn_bets(-0.05, 60)
    low, high = limits(bets, -0.05, (-1, 1), 0.95)
    for side, found, grid in ((ABOVE, low, np.linspace(-0.3, -0.05, 400)), (BELOW, high, np.linspace(-0.05, 0.3, 400))):
        gains = SIGNS[side] * bets.stakes_SKR[side][:, :, None] * (bets.values_R[:, None] - grid)
        wealth = np.tensordot([0.25, 0.5, 0.25], np.exp(np.log1p(gains).cumsum(axis=1)), axes=1).max(axis=0)
        kept = grid[wealth < 20]
        assert found == pytest.approx(kept.min() if side == ABOVE else kept.max(), abs=0.001)
    assert evidence.peaks_SR[ABOVE, 0] < np.log(20)


def test_evidence_that_reaches_the_level_ends_the_interval_at_the_bound() -> None:
    bets, evidence = drawn_bets(-0.05)
    assert evidence.peaks_SR[ABOVE, 0] > np.log(20)
    low, high = limits(bets, -0.05, (-1, 1), 0.95)
    assert low == -0.05
    assert -0.05 < high < 0.1


def test_strata_separate_right_from_wrong_and_halve_towards_the_least_sure_who_flip_more() -> None:
    random = np.random.default_rng(1)
    reference, sureness = (random.random(1000) < 0.7).astype(float), random.random(1000)
    population = difference_population(reference, sureness)
    for side in (0.0, 1.0):
        members = np.flatnonzero(reference == side)
        found = np.unique(population.strata_N[members])
        assert len(found) == 5
        assert not set(found) & set(population.strata_N[reference != side])
        ordered = population.strata_N[members[np.argsort(sureness[members])]]
        assert (np.diff(ordered) >= 0).all()
        assert np.bincount(ordered)[found[-1]] == -(-len(members) // 2)
        assert np.bincount(ordered)[found[0]] == len(members) // 16
    population = difference_population(np.ones(160), np.arange(160))
    assert population.expected_H.tolist() == [0.75, 0.875, 0.9375, 0.96875, 0.984375]
