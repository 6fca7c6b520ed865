"""Strata, weights and draws, against counting and exact probabilities of small cases."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from olive_ext.stats.sampling_design import (
    Queues,
    difference_population,
    draw_probabilities,
    mean_population,
)


def test_strata_separate_right_from_wrong_and_halve_towards_the_least_sure() -> None:
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


@pytest.mark.parametrize("count", [1, 7, 15, 50])
def test_small_tasks_have_fewer_strata(count: int) -> None:
    population = difference_population(np.ones(count), np.arange(count))
    sizes = np.bincount(population.strata_N)
    assert sizes.sum() == count
    assert len(sizes) == 1 or sizes.min() >= 8


@pytest.mark.parametrize("value", [0.5, -1.5, np.inf])
def test_value_outside_its_limits_is_refused(value: float) -> None:
    population = difference_population([1.0])
    with pytest.raises(ValueError, match="outside the limits"):
        population.shares(np.array([0]), [value])


def test_draws_visit_every_document_once_and_repeat_with_the_seed() -> None:
    population = mean_population([3, 0, 2, 1, 4, 1], highest=1.0)
    scores = np.ones(1)

    def drawn(seed: int) -> list[int]:
        queues = Queues(population, np.random.default_rng(seed))
        first = queues.draw(2, population.unseen_H, scores)
        left = np.array([population.weights_N.sum() - population.weights_N[first].sum()])
        return [*first.tolist(), *queues.draw(99, left, scores).tolist()]

    assert sorted(drawn(0)) == [0, 2, 3, 4, 5]  # the one without positions is never asked
    assert drawn(0) == drawn(0)
    assert any(drawn(0) != drawn(seed) for seed in range(1, 5))


def test_orders_have_the_probabilities_of_successive_draws_by_weight() -> None:
    population = mean_population([1, 2, 3], highest=1.0)
    counts = dict.fromkeys(permutations(range(3)), 0)
    random, times = np.random.default_rng(0), 1000
    for _ in range(times):
        counts[tuple(Queues(population, random).draw(3, population.unseen_H, np.ones(1)).tolist())] += 1
    for order, count in counts.items():
        sizes = np.array([1, 2, 3])[list(order)]
        expected = sizes[0] / 6 * sizes[1] / (6 - sizes[0])
        assert count / times == pytest.approx(expected, abs=4 * np.sqrt(expected / times))


def test_neyman_allocation_has_the_least_variance() -> None:
    unseen, deviations = np.array([[0.5, 0.3, 0.2]]), np.array([[0.1, 0.5, 0.3]])
    best = draw_probabilities(unseen, deviations)

    def variance(probabilities: np.ndarray) -> float:
        return float(np.sum((unseen * deviations) ** 2 / probabilities))

    assert variance(best) == pytest.approx(float(np.sum(unseen * deviations)) ** 2)
    random = np.random.default_rng(0)
    assert all(variance(random.dirichlet(np.ones(3))) >= variance(best) for _ in range(200))
