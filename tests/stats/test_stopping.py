"""Whole samplers: verdicts, what they ask, and how often they are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from olive_ext.stats.stopping import Claim, ClaimDecision, Population, Sampler, difference_population, mean_population

WITHIN_ONE_POINT = Claim(-0.01, "above", 0.01)


def asked(population: Population, values: np.ndarray, claim: Claim, seed: int = 0) -> tuple[ClaimDecision, list[int]]:
    """The decision of a sampler that runs until there is one, and the documents it asked."""
    sampler, documents = Sampler(population, claim, seed), []
    while sampler.asks:
        batch = sampler.next_batch()
        documents += batch.tolist()
        sampler.update(values[batch])
    return sampler.decision(), documents


def answers(count: int, lost: float, gained: float, seed: int = 0) -> tuple[Population, np.ndarray]:
    """Answers that flip where the reference is least sure, and their differences."""
    random = np.random.default_rng(seed)
    reference, sureness = (np.arange(count) % 4 > 0).astype(float), random.random(count)
    candidate = reference.copy()
    for side, share in ((1, lost), (0, gained)):
        members = np.flatnonzero(reference == side)
        weakest = members[np.argsort(sureness[members] + 0.2 * random.random(len(members)))]
        candidate[weakest[: round(share * count)]] = 1 - side
    return difference_population(reference, sureness), candidate - reference


def test_equal_model_is_certain_after_a_few_hundred_of_ten_thousand() -> None:
    decision, documents = asked(*answers(10_000, 0, 0), WITHIN_ONE_POINT)
    assert decision.verdict == "ok"
    assert len(documents) == len(set(documents)) == decision.num_evaluated < 500
    assert decision.num_documents == 10_000
    assert -0.01 <= decision.low <= decision.estimate == 0 <= decision.high < 0.03


def test_model_that_loses_five_points_is_broken_within_a_tenth() -> None:
    decision, _ = asked(*answers(10_000, 0.06, 0.01), WITHIN_ONE_POINT)
    assert decision.verdict == "loss"
    assert decision.num_evaluated < 1000
    assert decision.high <= -0.01


def test_model_that_breaks_only_what_the_reference_is_surest_of_is_caught() -> None:
    random = np.random.default_rng(0)
    reference, sureness = np.ones(10_000), random.random(10_000)
    differences = np.where(sureness > np.quantile(sureness, 0.97), -1.0, 0.0)
    decision, _ = asked(difference_population(reference, sureness), differences, WITHIN_ONE_POINT)
    assert decision.verdict == "loss"
    assert decision.num_evaluated < 5000


@pytest.mark.parametrize(("lost", "verdict"), [(1, "ok"), (2, "loss")])
def test_small_task_at_its_bound_is_decided_by_all_documents(lost: int, verdict: str) -> None:
    differences = np.zeros(100)
    differences[:lost] = -1
    decision, documents = asked(difference_population(np.ones(100)), differences, WITHIN_ONE_POINT)
    assert decision.verdict == verdict
    if decision.num_evaluated == 100:
        assert decision.low == decision.high == decision.estimate == pytest.approx(-lost / 100)
    assert len(set(documents)) == len(documents)


def test_continues_to_all_without_asking_anything_twice() -> None:
    population, differences = answers(1000, 0.02, 0.01)
    sampler = Sampler(population, WITHIN_ONE_POINT)
    first = sampler.next_batch()
    sampler.update(differences[first])
    rest = sampler.next_batch(1000)
    sampler.update(differences[rest])
    assert sorted([*first, *rest]) == list(range(1000))
    assert not len(sampler.next_batch())
    decision = sampler.decision()
    assert decision.estimate == decision.low == decision.high == pytest.approx(differences.mean())
    assert decision.verdict == "ok"  # exactly at the bound, despite rounding


def test_disagreement_and_kl_are_decided_over_documents() -> None:
    random = np.random.default_rng(0)
    positions = random.integers(1, 40, 800)
    shares = random.beta(2, 60, 800)  # 3 % of positions
    within = Claim(0.1, "below", 0.1)
    decision, _ = asked(mean_population(positions, 1.0, random.random(800)), shares, within)
    assert decision.verdict == "ok"
    assert decision.num_evaluated < 200
    beyond = Claim(0.01, "below", 0.01)
    assert asked(mean_population(positions, 1.0), shares, beyond)[0].verdict == "loss"


def test_wrong_verdicts_at_the_bound_are_rarer_than_the_error() -> None:
    population, differences = answers(80, 0.1, 0.1)
    claim = Claim(float(differences.mean()) + 1e-6, "above", 0.1, confidence=0.7)
    verdicts = [asked(population, differences, claim, seed)[0].verdict for seed in range(60)]
    assert verdicts.count("ok") <= 25  # 18 and two standard deviations


@pytest.mark.long
def test_estimates_at_a_fixed_number_are_unbiased() -> None:
    population, differences = answers(400, 0.1, 0.03)
    estimates = []
    for seed in range(40):
        sampler = Sampler(population, WITHIN_ONE_POINT, seed)
        for count in (20, 20, 60):
            sampler.update(differences[sampler.next_batch(count)])
        estimates.append(sampler.decision().estimate)
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(differences.mean(), abs=3 * error)
    assert np.std(estimates) < np.std(differences) / np.sqrt(100)  # less than of 100 documents drawn alike


def test_asked_documents_stand_for_their_strata() -> None:
    population, differences = answers(400, 0.1, 0.03)
    sampler = Sampler(population, WITHIN_ONE_POINT)
    sampler.update(differences[sampler.next_batch(100)])
    counts = sampler.representation()
    documents, numbers = np.array(list(counts)), np.array(list(counts.values()))
    assert len(documents) == 100
    for stratum in np.unique(population.strata_N):
        members = population.strata_N == stratum
        assert numbers[members[documents]] == pytest.approx(members.sum() / members[documents].sum())


@pytest.mark.long
def test_documents_drawn_by_their_positions_stand_for_all_positions() -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(1, 60, 300)
    values = 1 / sizes  # short documents differ, and are drawn seldom
    population = mean_population(sizes, 1.0)
    truth, estimates = np.average(values, weights=sizes), []
    for seed in range(200):
        sampler = Sampler(population, Claim(0.5, "below", 0.5), seed)
        sampler.update(values[sampler.next_batch(60)])
        counts = sampler.representation()
        drawn, weights = np.array(list(counts)), np.array(list(counts.values()))
        estimates.append(np.average(values[drawn], weights=weights * sizes[drawn]))
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(truth, abs=3 * error)
    assert 3 * error < 0.05 * truth
    sampler.update(values[sampler.next_batch(300)])
    assert list(sampler.representation().values()) == pytest.approx([1.0] * 300)


def test_document_without_a_value_counts_as_what_is_against_either_verdict() -> None:
    population, differences = answers(1000, 0.0, 0.0)
    unknown = differences.copy()
    unknown[np.random.default_rng(0).choice(1000, 30, replace=False)] = np.nan
    decision, documents = asked(population, unknown, WITHIN_ONE_POINT)
    assert (decision.verdict, len(documents), decision.num_unknown) == ("unknown", 1000, 30)
    assert decision.low < -0.01 <= decision.estimate <= decision.high
    assert decision.high - decision.low == pytest.approx(0.03)
    wider, _ = asked(population, unknown, Claim(-0.05, "above", 0.05))
    assert wider.verdict == "ok"
    assert wider.num_unknown > 0
    lossy = np.where(np.isnan(unknown), np.nan, population.lows_N)
    assert asked(population, lossy, WITHIN_ONE_POINT)[0].verdict == "loss"


@pytest.mark.parametrize(("bound", "verdict"), [(0.0131, "ok"), (0.01, "unknown"), (0.004, "loss")])
def test_error_of_estimates_is_carried_by_both_verdicts(bound: float, verdict: str) -> None:
    """With errors of 0.02 of 400 documents the mean of 0.01 has one of 0.001; lower bounds are 0.006."""
    sampler = Sampler(mean_population(np.ones(400), 1.0), Claim(bound, "below", bound))
    while sampler.asks:
        count = len(sampler.next_batch())
        sampler.update(np.full(count, 0.01), np.full(count, 0.006), np.full(count, 0.02**2))
    decision = sampler.decision()
    assert decision.verdict == verdict
    if verdict == "unknown":
        assert (decision.low, decision.estimate) == pytest.approx((0.006, 0.01))
        assert decision.high == pytest.approx(0.01 + 3 * 0.001)


@pytest.mark.long
def test_error_of_estimates_makes_wrong_verdicts_no_more_frequent() -> None:
    random, wrong = np.random.default_rng(0), 0
    for seed in range(200):
        true = random.gamma(0.5, 0.04, 300)
        errors = 0.5 * true + 0.02
        estimates = true + errors * random.standard_normal(300)
        bound = float(true.mean()) - 1e-9  # the claim is broken, by next to nothing
        sampler = Sampler(mean_population(np.ones(300), 1.0), Claim(bound, "below", bound), seed)
        while sampler.asks:
            batch = sampler.next_batch()
            sampler.update(np.clip(estimates[batch], 0, 1), true[batch] / 2, errors[batch] ** 2)
        wrong += sampler.verdict == "ok"
    assert wrong <= 0.05 * 200
