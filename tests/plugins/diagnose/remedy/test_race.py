"""The race's certainty holds on made-up losses, costs less than measuring everything, and says what is open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from olive_ext.plugins.diagnose.remedy.race import Race, estimate

NUM_DOCUMENTS, NUM_LARGEST = 160, 5


def losses(
    seed: int, spread: float | None, count: int = 40, num_documents: int = NUM_DOCUMENTS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True means [Q] with their sums by document [Q, N], and positions [N]; hard documents lose more of everything.
    Without a spread each mean is two thirds of the one before."""
    rng = np.random.default_rng(seed)
    means = (2 / 3) ** np.arange(count) if spread is None else np.exp(rng.normal(0, spread, count))
    positions = rng.integers(10, 60, num_documents)
    difficulty = rng.gamma(2, 0.5, num_documents)
    sums = means[:, None] * positions * difficulty * rng.gamma(4, 0.25, (count, num_documents))
    return means, sums, positions


def raced(sums: np.ndarray, positions: np.ndarray, seed: int) -> tuple[Race, frozenset[int]]:
    def measure(quantity: int, documents: Sequence[int]) -> np.ndarray:
        return sums[quantity, documents]

    race = Race(len(sums), positions, measure, seed)
    return race, race.run(NUM_LARGEST)


def test_what_is_certain_is_among_the_largest_in_at_least_95_of_100_races() -> None:
    wrong = 0
    for seed in range(200):
        means, sums, positions = losses(seed, 0.5)
        _, certain = raced(sums, positions, seed)
        wrong += not certain <= set(np.argsort(-means)[:NUM_LARGEST].tolist())
    assert wrong <= 10


def test_clear_losses_are_all_certain_at_less_than_half_of_the_work() -> None:
    means, sums, positions = losses(1, None)
    race, certain = raced(sums, positions, 1)
    assert certain == set(np.argsort(-means)[:NUM_LARGEST].tolist())
    assert race.num_passes < 0.5 * len(means)


def test_211_losses_take_at_most_60_passes() -> None:
    passes = []
    for seed in range(8):
        _, sums, positions = losses(seed, 1.3, count=211, num_documents=400)
        race = Race(211, positions, lambda quantity, documents, sums=sums: sums[quantity, documents], seed)
        race.run(10)
        passes.append(race.num_passes)
    assert max(passes) <= 60
    assert np.median(passes) < 45


def test_equal_losses_leave_the_order_open_and_every_document_measured() -> None:
    _, sums, positions = losses(2, 0.0)
    race, certain = raced(sums, positions, 2)
    assert not certain
    assert race.num_passes == pytest.approx(len(sums))


@pytest.mark.parametrize("count", [30, 60, 240])
def test_interval_covers_where_few_documents_have_most_of_the_loss(count: int) -> None:
    rng, covered = np.random.default_rng(0), 0
    positions = np.full(count, 10.0)
    for _ in range(1000):
        found = estimate(rng.gamma(0.3, size=count), positions)
        covered += found.low <= 0.03 <= found.high
    assert covered >= 0.93 * 1000, "Student's intervals of 30 documents hold in 87 % here"


def test_one_document_has_no_interval() -> None:
    assert estimate(np.array([3.0]), np.array([2.0])).high == np.inf
