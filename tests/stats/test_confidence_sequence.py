"""Limits against a grid of values."""

from __future__ import annotations

import numpy as np
import pytest

from olive_ext.stats.sampling_design import difference_population
from olive_ext.stats.stopping import ABOVE, BELOW, Bet, Evidence, joined, limits

SIGNS = {ABOVE: 1, BELOW: -1}


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


def test_limits_without_bets_are_the_logical_ones() -> None:
    assert limits(joined([]), 0.0, (-0.6, 0.4), 0.95) == (-0.6, 0.4)
    assert limits(joined([]), 0.0, (0.1, 0.4), 0.95) == (0.1, 0.4)
    assert limits(joined([]), 0.0, (-0.6, -0.2), 0.95) == (-0.6, -0.2)


def test_what_the_documents_prove_bounds_what_bets_say() -> None:
    bets, _ = drawn_bets(-0.05)
    assert limits(bets, -0.05, (-0.3, -0.1), 0.95) == (-0.1, -0.1)
