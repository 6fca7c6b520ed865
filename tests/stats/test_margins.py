"""Shrink factors, noise and predicted changes, against numbers worked out another way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from olive_ext.stats.margins import ChangeModel, noise, shrink_factor


def drawn(count: int, seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Both models' margins [count] of answers of which some change."""
    random = np.random.default_rng(seed)
    reference = random.exponential(3.0, count)
    return reference, 0.9 * reference + spread * random.logistic(size=count)


def test_shrink_factor_is_the_ratio_of_sums_with_the_error_of_leaving_documents_out() -> None:
    """Cochran's error is the delete-one jackknife's within 5 %, where documents have several items and weights."""
    reference, candidate = drawn(300, 0)
    random = np.random.default_rng(1)
    documents, weights = np.arange(300) // 3, np.repeat(random.uniform(1, 3, 100), 3)
    factor, low, high = shrink_factor(reference, candidate, documents, weights)
    assert factor == pytest.approx((weights * candidate).sum() / (weights * reference).sum())
    left = [weights * (documents != each) for each in range(100)]
    values = np.array([(own * candidate).sum() / (own * reference).sum() for own in left])
    jackknife = math.sqrt(99 / 100 * ((values - values.mean()) ** 2).sum())
    assert (high - low) / 2 == pytest.approx(1.984217 * jackknife, rel=0.05)  # Student's quantile of 99 degrees


def test_margins_of_ties_in_the_reference_count() -> None:
    """An answer that was tied in the reference adds to the candidate's sum."""
    factor, _, _ = shrink_factor(np.array([0.0, 2.0]), np.array([-1.0, 2.0]), np.arange(2))
    assert factor == 0.5


def test_equal_models_have_a_factor_of_exactly_one_and_no_noise() -> None:
    """To the last bit, however many items and weights."""
    reference, _ = drawn(1001, 2)
    documents, weights = np.arange(1001) // 7, np.random.default_rng(0).uniform(1, 9, 1001)
    assert shrink_factor(reference, reference, documents, weights) == (1.0, 1.0, 1.0)
    assert noise(reference, reference, 1.0) == 0.0


def test_a_single_document_has_no_error_and_ties_alone_no_factor() -> None:
    """The interval is infinite, or nothing is a number."""
    assert shrink_factor(np.ones(3), np.full(3, 0.5), np.zeros(3, np.int64)) == (0.5, -math.inf, math.inf)
    assert all(map(math.isnan, shrink_factor(np.zeros(2), np.ones(2), np.arange(2))))


def test_noise_is_what_ninety_five_of_a_hundred_stay_within() -> None:
    """By a plain count."""
    reference, candidate = drawn(2000, 3)
    within = np.abs(candidate - 0.9 * reference) <= noise(reference, candidate, 0.9)
    assert within.mean() == pytest.approx(0.95, abs=1e-3)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_change_model_solves_firths_score_equations(spread: float) -> None:
    """sum (y - p + h (1/2 - p)) x = 0 with the hat matrix's diagonal h: Firth 1993, written out anew."""
    reference, candidate = drawn(200, 4, spread)
    changed = candidate < 0
    chances = ChangeModel(reference, candidate, changed).probabilities(reference)
    moved = candidate - candidate.sum() / reference.sum() * reference
    design = np.column_stack([np.ones(200), np.log1p(reference / math.sqrt((moved**2).mean()))])
    root = design * np.sqrt(chances * (1 - chances))[:, None]
    hat = np.einsum("nk,kl,nl->n", root, np.linalg.inv(root.T @ root), root)
    score = design.T @ (changed - chances + hat * (0.5 - chances))
    assert np.abs(score).max() < 0.01
    assert np.linalg.lstsq(design, np.log(chances / (1 - chances)))[1][0] < 1e-12  # what a line leaves


@pytest.mark.parametrize("changed", [0.0, 1.0])
def test_none_or_all_changed_is_no_certainty(changed: float) -> None:
    """40 documents without a change exclude neither none nor a few of 40 others, nor 40 with one all but a few."""
    reference, _ = drawn(40, 5)
    number, low, high = ChangeModel(reference, reference, np.full(40, changed)).predict(reference)
    number, low, high = (number, low, high) if not changed else (40 - number, 40 - high, 40 - low)
    assert (low, 0 < number < 3, 1 <= high <= 8) == (0.0, True, True)


def test_predictions_are_those_of_drawing_coefficients_and_answers() -> None:
    """Against 1,500 draws of the coefficients, of the margins where only their number is known, and of answers."""
    reference, candidate = drawn(150, 6)
    others, _ = drawn(400, 7)
    model = ChangeModel(reference, candidate, candidate < 0)
    number, low, high = model.predict(others)
    random = np.random.default_rng(0)
    design = np.column_stack([np.ones(400), np.log1p(others / model._scale)])
    thetas = random.multivariate_normal(model._theta, model._covariance, 1500)
    counts = random.binomial(1, 1 / (1 + np.exp(-thetas @ design.T))).sum(1)
    assert number == pytest.approx(model.probabilities(others).sum())
    assert (low, high) == pytest.approx(np.quantile(counts, [0.05, 0.95]), abs=3)
    more, least, most = model.predict(others, 200)
    assert more == pytest.approx(number / 2)
    chances = 1 / (1 + np.exp(-thetas @ design.T))
    counts = [random.binomial(1, random.choice(each, 200)).sum() for each in chances]
    assert (least, most) == pytest.approx(np.quantile(counts, [0.05, 0.95]), abs=3)


@pytest.mark.parametrize("is_known", [True, False])
def test_intervals_cover_what_changes_of_others(is_known: bool) -> None:
    """88 % or more of 40 draws, whether the others' margins are known or only how many there are."""
    held = 0
    for seed in range(40):
        reference, candidate = drawn(500, seed)
        own, rest = slice(0, 100), slice(100, 500)
        model = ChangeModel(reference[own], candidate[own], candidate[own] < 0)
        told = (reference[rest],) if is_known else (reference[own], 400)
        _, low, high = model.predict(*told)
        held += low <= (candidate[rest] < 0).sum() <= high
    assert held >= 0.88 * 40
