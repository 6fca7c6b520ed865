"""Paired statistics against scipy and brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from olive_ext.stats.paired_answers import (
    compare_outcomes,
    difference_interval,
    documents_needed,
    mcnemar_p,
)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (5, 5), (6, 1), (3, 14), (40, 25)])
def test_mcnemar_is_the_sum_of_all_outcomes_at_most_as_likely(lost: int, gained: int) -> None:
    flipped = lost + gained
    likelihood = [math.comb(flipped, count) for count in range(flipped + 1)]
    expected = sum(item for item in likelihood if item <= likelihood[lost]) / 2**flipped
    assert mcnemar_p(lost, gained) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_p(lost, gained) == mcnemar_p(gained, lost)


@pytest.mark.parametrize(("share", "total"), [(0, 400), (1, 1), (3, 40), (40, 40), (120, 300)])
def test_interval_of_shares_is_clopper_and_pearsons(share: int, total: int) -> None:
    """Of 0 and 1 alone, within draws: the limits are those of a binomial share, with 0 and 1 as the ends."""
    values = np.repeat([1.0, 0.0], [share, total - share])
    exact = stats.binomtest(share, total).proportion_ci(0.95, method="exact")
    # Half as wide: from -1/2 to 1/2 a document's value is one of both ends.
    low, high, _ = difference_interval(values - 0.5, 0.5)
    assert (low + 0.5, high + 0.5) == pytest.approx((exact.low, exact.high), abs=1e-9)


@pytest.mark.parametrize(
    ("same", "counts"), [(0, range(1, 41)), pytest.param(400, (*range(1, 11), 20, 33, 47, 60), marks=pytest.mark.long)]
)
def test_interval_excludes_zero_where_the_exact_test_does(same: int, counts: Sequence[int]) -> None:
    """Of all counts of flips up to 40, both ends, and of some beside documents without a change."""
    told = []
    for flipped in counts:
        for lost in range(flipped + 1):
            low, high, _ = difference_interval(np.repeat([-1.0, 1.0, 0.0], [lost, flipped - lost, same]))
            told += [(lost, flipped - lost)] * ((low > 0 or high < 0) != (mcnemar_p(lost, flipped - lost) < 0.05))
            assert low <= (flipped - 2 * lost) / (flipped + same) <= high
    assert told == []


@pytest.mark.parametrize(("lost", "won", "same"), [(20, 6, 374), (1, 3, 16), (5, 5, 0), (0, 8, 30), (22, 17, 401)])
def test_interval_of_flips_is_that_of_drawn_shares(lost: int, won: int, same: int) -> None:
    """Equal weights, which are drawn."""
    differences = np.repeat([-1.0, 1.0, 0.0], [lost, won, same])
    drawn = difference_interval(differences, weights=np.ones(len(differences)))[:2]
    assert difference_interval(differences)[:2] == pytest.approx(drawn, abs=0.05 * (drawn[1] - drawn[0]))


def test_interval_repeats() -> None:
    differences = np.random.default_rng(0).normal(size=50) / 9
    assert difference_interval(differences) == difference_interval(differences)
    many = np.random.default_rng(0).normal(size=2000) / 9
    drawn = difference_interval(many, weights=np.ones(2000))[:2]
    assert drawn == pytest.approx(difference_interval(many)[:2], abs=3e-4), "equal weights are none"


def test_interval_reaches_where_a_direction_was_not_seen() -> None:
    low, high, _ = difference_interval(np.zeros(400))
    exact = stats.binomtest(0, 400).proportion_ci(0.95, method="exact").high
    assert (low, high) == pytest.approx((-exact, exact))
    assert high == pytest.approx(3.69 / 400, rel=0.01)
    low, high, _ = difference_interval(np.array([1.0] + [0.0] * 399))
    assert low < -2.9 / 400
    assert high > 1 / 400
    low, *_ = difference_interval(np.array([1.0] * 50 + [0.0] * 350))
    assert low > 0.08


LAWS = {
    "rare": lambda random, n: -1.0 * (random.random(n) < 0.05),
    "rare beside small": lambda random, n: np.where(random.random(n) < 0.05, -1.0, random.normal(0, 0.01, n)),
    "flips": lambda random, n: random.choice([-1.0, 0.0, 1.0], n, p=[0.06, 0.9, 0.04]),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count", [1, 5, *(pytest.param(count, marks=pytest.mark.long) for count in (20, 100))])
def test_a_loss_is_excluded_as_seldom_as_is_said(law: str, count: int) -> None:
    """Each end fails in at most 2.5 % of cases: of 200 at most 12 (0.2 % chance); a bootstrap's fail in 36 % where no
    rare loss was drawn."""
    random = np.random.default_rng(5)
    mean = float(LAWS[law](random, 1_000_000).mean())
    missed = [low > mean for low, *_ in (difference_interval(LAWS[law](random, count)) for _ in range(200))]
    assert sum(missed) <= 12


@pytest.mark.parametrize("law", ["one side", "both", "alike", "unbounded"])
@pytest.mark.parametrize("count", [1, 5, 20, pytest.param(200, marks=pytest.mark.long)])
def test_p_is_below_five_per_cent_where_the_interval_excludes_zero(law: str, count: int) -> None:
    """A test of its own contradicts it: one of signs is sure of 6 values of one sign."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        values = random.normal(0.1 * seed / math.sqrt(count), 0.3, count)
        values = {"one side": np.abs(values) / 9, "alike": np.full(count, seed / 30)}.get(law, values)
        middle = 200.0 if law == "unbounded" else 0.5
        found = compare_outcomes("t", "f1", "none", middle - values / 2, middle + values / 2)
        assert (found.mcnemar_p < 0.05) == (not found.low <= 0 <= found.high)


@pytest.mark.parametrize("count", [1, 2, 5, 12, *(pytest.param(count, marks=pytest.mark.long) for count in (13, 40))])
def test_a_change_of_equal_models_is_as_unlikely_as_is_said(count: int) -> None:
    """With tails as heavy as Cauchy's: p below 5 % in at most 5 % of cases, of 300 at most 26 (0.3 % chance)."""
    random = np.random.default_rng(1)
    drawn = (random.standard_cauchy(count) for _ in range(300))
    assert sum(difference_interval(each, float(np.abs(each).max()))[2] < 0.05 for each in drawn) <= 26


def power(discordance: float, size: float, documents: int) -> float:
    """Exact power of the unconditional test by summing over flips (normal critical value)."""
    random = np.random.default_rng(1)
    up, down = (discordance + size) / 2, (discordance - size) / 2
    drawn = random.multinomial(documents, [up, down, 1 - up - down], size=20_000)
    flipped = drawn[:, 0] + drawn[:, 1]
    z = np.abs(drawn[:, 0] - drawn[:, 1]) / np.sqrt(np.maximum(flipped, 1))
    return float(np.mean(z > stats.norm.ppf(0.975)))


def test_needed_documents_give_the_power_are_connors_example_and_none_without_a_flip() -> None:
    differences = np.array([-1.0] * 5 + [1.0] * 5 + [0.0] * 90)
    needed = documents_needed(differences, 0.02, is_binary=True)
    assert needed is not None
    assert power(0.10, 0.02, needed) == pytest.approx(0.8, abs=0.02)
    # psi = 0.2, delta = 0.1: (1.96 sqrt(.2) + 0.8416 sqrt(.19))^2 / .01
    differences = np.array([-1.0, 1.0] * 10 + [0.0] * 80)
    expected = (1.959964 * math.sqrt(0.2) + 0.841621 * math.sqrt(0.19)) ** 2 / 0.01
    assert documents_needed(differences, 0.1, is_binary=True) == math.ceil(expected)
    assert [documents_needed(np.zeros(10), 0.01, is_binary=one) for one in (True, False)] == [None, None]


def test_loss_that_matters_has_its_own_number_in_points_of_the_metric() -> None:
    share = compare_outcomes("t", "acc", "none", [1, 1, 0, 1], [1, 0, 0, 1], matters=3.0)
    assert share.documents_needed["0.03"] == documents_needed([0, -1, 0, 0], 0.03, is_binary=True)
    points = compare_outcomes("t", "bleu", "none", [30.0, 40.0], [31.0, 39.0], matters=3.0)
    assert points.documents_needed["1.05"] == documents_needed([1.0, -1.0], 1.05, is_binary=False), "3 % of 35"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_outcome_agrees_with_a_naive_count(pairs: list[tuple[int, int]]) -> None:
    reference, candidate = zip(*pairs, strict=True)
    found = compare_outcomes("t", "acc", "none", reference, candidate)
    assert (found.right_to_wrong, found.wrong_to_right) == (pairs.count((1, 0)), pairs.count((0, 1)))
    assert found.difference == pytest.approx((pairs.count((0, 1)) - pairs.count((1, 0))) / len(pairs))
    assert found.candidate - found.reference == pytest.approx(found.difference)
    assert found.low <= found.difference <= found.high
    assert 0 < found.mcnemar_p <= 1
