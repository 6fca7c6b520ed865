"""Paired statistics against scipy and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from olive_ext.stats.paired_answers import compare_outcomes, difference_interval, documents_needed, flips, mcnemar_p


def outcome_values(lost: int, gained: int, right: int, wrong: int) -> tuple[np.ndarray, np.ndarray]:
    reference = np.array([1.0] * lost + [0.0] * gained + [1.0] * right + [0.0] * wrong)
    candidate = np.array([0.0] * lost + [1.0] * gained + [1.0] * right + [0.0] * wrong)
    return reference, candidate


def test_flips_count_both_directions() -> None:
    assert flips(*outcome_values(3, 2, 10, 5)) == (3, 2)
    assert flips(*outcome_values(3, 2, 10, 5), higher_is_better=False) == (2, 3)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (5, 5), (6, 1), (3, 14), (40, 25)])
def test_mcnemar_is_the_sum_of_all_outcomes_at_most_as_likely(lost: int, gained: int) -> None:
    flipped = lost + gained
    likelihood = [math.comb(flipped, count) for count in range(flipped + 1)]
    expected = sum(item for item in likelihood if item <= likelihood[lost]) / 2**flipped
    assert mcnemar_p(lost, gained) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_p(lost, gained) == mcnemar_p(gained, lost)


def test_interval_is_scipys_bca() -> None:
    differences = np.diff(outcome_values(12, 4, 150, 34), axis=0)[0]
    theirs = stats.bootstrap(
        (differences,), np.mean, n_resamples=20_000, method="BCa", random_state=np.random.default_rng(3)
    ).confidence_interval
    ours = difference_interval(differences, is_binary=True, num_resamples=20_000)
    assert ours == pytest.approx(tuple(theirs), abs=0.0051)  # a document is 0.005


def test_interval_of_other_values_is_scipys_bca() -> None:
    differences = np.random.default_rng(0).gamma(1.0, 2.0, 300)
    theirs = stats.bootstrap((differences,), np.mean, n_resamples=20_000, method="BCa").confidence_interval
    ours = difference_interval(differences, is_binary=False, num_resamples=20_000)
    assert ours == pytest.approx(tuple(theirs), rel=0.01)


def test_interval_repeats_and_depends_on_the_seed() -> None:
    differences = np.random.default_rng(0).normal(size=50)
    first = difference_interval(differences, is_binary=False, seed=1)
    assert first == difference_interval(differences, is_binary=False, seed=1)
    assert first != difference_interval(differences, is_binary=False, seed=2)


def test_interval_without_flips_claims_no_certainty() -> None:
    low, high = difference_interval(np.zeros(400), is_binary=True)
    exact = stats.binomtest(0, 400).proportion_ci(0.95, method="exact").high
    assert (low, high) == (-exact, exact)
    assert high == pytest.approx(3.69 / 400, rel=0.01)


def test_interval_reaches_where_one_direction_was_not_seen() -> None:
    low, high = difference_interval(np.array([1.0] + [0.0] * 399), is_binary=True)
    assert low < -3 / 400
    assert high > 1 / 400
    low, _ = difference_interval(np.array([1.0] * 50 + [0.0] * 350), is_binary=True)
    assert low > 0.08


def test_interval_covers_the_true_difference_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    hits, trials = 0, 300
    for trial in range(trials):
        drawn = random.choice([-1.0, 0.0, 1.0], p=[0.06, 0.90, 0.04], size=400)
        low, high = difference_interval(drawn, is_binary=True, seed=trial, num_resamples=1000)
        hits += low <= -0.02 <= high
    assert 0.91 <= hits / trials <= 0.98


def power(discordance: float, size: float, documents: int) -> float:
    """Exact power of the unconditional test by summing over flips (normal critical value)."""
    random = np.random.default_rng(1)
    up, down = (discordance + size) / 2, (discordance - size) / 2
    drawn = random.multinomial(documents, [up, down, 1 - up - down], size=20_000)
    flipped = drawn[:, 0] + drawn[:, 1]
    z = np.abs(drawn[:, 0] - drawn[:, 1]) / np.sqrt(np.maximum(flipped, 1))
    return float(np.mean(z > stats.norm.ppf(0.975)))


def test_needed_documents_give_the_power() -> None:
    differences = np.array([-1.0] * 5 + [1.0] * 5 + [0.0] * 90)
    needed = documents_needed(differences, 0.02, is_binary=True)
    assert needed is not None
    assert power(0.10, 0.02, needed) == pytest.approx(0.8, abs=0.02)


def test_needed_documents_are_connors_example() -> None:
    # psi = 0.2, delta = 0.1: (1.96 sqrt(.2) + 0.8416 sqrt(.19))^2 / .01
    differences = np.array([-1.0, 1.0] * 10 + [0.0] * 80)
    expected = (1.959964 * math.sqrt(0.2) + 0.841621 * math.sqrt(0.19)) ** 2 / 0.01
    assert documents_needed(differences, 0.1, is_binary=True) == math.ceil(expected)


def test_no_number_of_documents_comes_from_no_flip() -> None:
    assert documents_needed(np.zeros(10), 0.01, is_binary=True) is None
    assert documents_needed(np.zeros(10), 0.01, is_binary=False) is None


def test_loss_that_matters_has_its_own_number_in_points_of_the_metric() -> None:
    share = compare_outcomes("t", "acc", "none", [1, 1, 0, 1], [1, 0, 0, 1], matters=3.0)
    assert share.documents_needed["0.03"] == documents_needed([0, -1, 0, 0], 0.03, is_binary=True)
    points = compare_outcomes("t", "bleu", "none", [30.0, 40.0], [31.0, 39.0], matters=3.0)
    assert points.documents_needed["3"] == documents_needed([1.0, -1.0], 3.0, is_binary=False)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_outcome_agrees_with_a_naive_count(pairs: list[tuple[int, int]]) -> None:
    reference, candidate = zip(*pairs, strict=True)
    found = compare_outcomes("t", "acc", "none", reference, candidate)
    assert (found.right_to_wrong, found.wrong_to_right) == (pairs.count((1, 0)), pairs.count((0, 1)))
    assert found.difference == pytest.approx((pairs.count((0, 1)) - pairs.count((1, 0))) / len(pairs))
    assert found.candidate - found.reference == pytest.approx(found.difference)
    assert found.low <= found.difference <= found.high
    assert 0 < found.mcnemar_p <= 1


def test_small_bootstrap_is_the_enumerated_one() -> None:
    """All 4^4 resamples of four documents, against the drawn ones: the same distribution of means."""
    from olive_ext.stats.paired_answers import _resampled_means

    values = np.array([0.0, 0.3, -0.2, 1.0])
    every = [np.mean(drawn) for drawn in itertools.product(values, repeat=4)]
    drawn = _resampled_means(values, np.random.default_rng(0), 50_000)
    quantiles = [0.025, 0.25, 0.5, 0.75, 0.975]
    assert np.quantile(drawn, quantiles) == pytest.approx(np.quantile(every, quantiles), abs=0.03)
    assert drawn.mean() == pytest.approx(values.mean(), abs=0.005)


def test_values_that_are_not_binary_have_no_flips() -> None:
    found = compare_outcomes("t", "f1", "none", [0.5, 0.2, 1.0], [0.4, 0.9, 1.0])
    assert (found.right_to_wrong, found.wrong_to_right, found.mcnemar_p) == (0, 0, 1.0)
    assert found.difference == pytest.approx(0.2)
    assert found.low < 0.2 < found.high


def test_many_documents_stay_fast_and_small() -> None:
    random = np.random.default_rng(0)
    found = compare_outcomes("t", "acc", "none", random.integers(0, 2, 50_000), random.integers(0, 2, 50_000))
    assert found.num_documents == 50_000
    assert found.high - found.low == pytest.approx(2 * 1.96 * math.sqrt(0.5 / 50_000), rel=0.05)
