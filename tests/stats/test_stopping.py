"""Whole samplers: verdicts, what they ask, and how often they are wrong; their bets against exact enumeration of all
draws from small populations."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from olive_ext.stats.stopping import (
    ABOVE,
    BELOW,
    Claim,
    Evidence,
    Population,
    Sampler,
    difference_population,
    draw_probabilities,
    mean_population,
)

WITHIN_ONE_POINT = Claim(-0.01, "above", 0.01)


def asked(population: Population, values: np.ndarray, claim: Claim, seed: int = 0) -> tuple[Any, list[int]]:
    """The decision of a sampler that runs until there is one, and the documents it asked."""
    sampler, documents = Sampler(population, claim, seed), []
    while sampler.asks:
        batch = sampler.next_batch()
        documents += batch.tolist()
        sampler.update(values[batch])
    return SimpleNamespace(**sampler.decision()), documents


def drawn_on(sampler: Sampler, values: np.ndarray, count: int) -> list[int]:
    """The documents of the next batches, of so many documents at least or of all that are left."""
    documents: list[int] = []
    while len(documents) < count and len(batch := sampler.next_batch()):
        sampler.update(values[batch])
        documents += batch.tolist()
    return documents


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
    decision, documents = asked(difference_population(np.ones(100), np.zeros(100)), differences, WITHIN_ONE_POINT)
    assert decision.verdict == verdict
    if decision.num_evaluated == 100:
        assert decision.low == decision.high == decision.estimate == pytest.approx(-lost / 100)
    assert len(set(documents)) == len(documents)


def test_continues_to_all_without_asking_anything_twice() -> None:
    population, differences = answers(1000, 0.02, 0.01)
    sampler = Sampler(population, WITHIN_ONE_POINT)
    first = sampler.next_batch()
    sampler.update(differences[first])
    rest = drawn_on(sampler, differences, 1000)
    assert sorted([*first, *rest]) == list(range(1000))
    assert not len(sampler.next_batch())
    decision = SimpleNamespace(**sampler.decision())
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
    assert asked(mean_population(positions, 1.0, np.zeros(800)), shares, beyond)[0].verdict == "loss"


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
        number = len(drawn_on(sampler, differences, 100))
        estimates.append(sampler.decision()["estimate"])
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(differences.mean(), abs=3 * error)
    assert np.std(estimates) < np.std(differences) / np.sqrt(number)  # less than of as many documents drawn alike


def test_asked_documents_stand_for_their_strata() -> None:
    population, differences = answers(400, 0.1, 0.03)
    sampler = Sampler(population, WITHIN_ONE_POINT)
    number = len(drawn_on(sampler, differences, 100))
    counts = sampler.representation()
    documents, numbers = np.array(list(counts)), np.array(list(counts.values()))
    assert len(documents) == number
    for stratum in np.unique(population.strata_N):
        members = population.strata_N == stratum
        assert numbers[members[documents]] == pytest.approx(members.sum() / members[documents].sum())


@pytest.mark.long
def test_documents_drawn_by_their_positions_stand_for_all_positions() -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(1, 60, 300)
    values = 1 / sizes  # short documents differ, and are drawn seldom
    population = mean_population(sizes, 1.0, np.zeros(300))
    truth, estimates = np.average(values, weights=sizes), []
    for seed in range(200):
        sampler = Sampler(population, Claim(0.5, "below", 0.5), seed)
        drawn_on(sampler, values, 60)
        counts = sampler.representation()
        drawn, weights = np.array(list(counts)), np.array(list(counts.values()))
        estimates.append(np.average(values[drawn], weights=weights * sizes[drawn]))
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(truth, abs=3 * error)
    assert 3 * error < 0.05 * truth
    drawn_on(sampler, values, 300)
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
    sampler = Sampler(mean_population(np.ones(400), 1.0, np.zeros(400)), Claim(bound, "below", bound))
    while sampler.asks:
        count = len(sampler.next_batch())
        sampler.update(np.full(count, 0.01), np.full(count, 0.006), np.full(count, 0.02**2))
    decision = SimpleNamespace(**sampler.decision())
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
        sampler = Sampler(mean_population(np.ones(300), 1.0, np.zeros(300)), Claim(bound, "below", bound), seed)
        while sampler.asks:
            batch = sampler.next_batch()
            sampler.update(np.clip(estimates[batch], 0, 1), true[batch] / 2, errors[batch] ** 2)
        wrong += sampler.verdict == "ok"
    assert wrong <= 0.05 * 200


SIGNS = {ABOVE: 1, BELOW: -1}


def small(name: str) -> tuple[Population, np.ndarray]:
    """A population of five or six documents and its shares."""
    if name == "answers":
        population = difference_population([1, 1, 1, 0, 0], np.zeros(5))
        return population, np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    if name == "clusters":
        return mean_population([1, 2, 5, 3, 1], 0.5, np.zeros(5)), np.array([0.1, 0.9, 0.0, 0.3, 1.0])
    strata, expected = np.array([0, 0, 1, 1, 2]), np.array([0.9, 0.2, 0.5])
    return Population(np.ones(5), np.zeros(5), np.ones(5), strata, expected), np.array([1.0, 1.0, 0.0, 0.0, 0.4])


def wanted(population: Population, shares: np.ndarray) -> float:
    return population.offset + float(population.weights_N @ shares)


def all_paths(
    population: Population, shares: np.ndarray, evidence: Evidence, done: tuple[int, ...] = (), chance: float = 1.0
) -> Iterator[tuple[float, Evidence]]:
    """(probability, evidence) of every order in which the documents can be drawn, scores anew before each draw."""
    scores = evidence.scores()
    probabilities = draw_probabilities(evidence.unseen_RH, scores)[0] if len(done) < len(shares) else []
    if len(done) == len(shares):
        yield chance, evidence
    for document in set(range(len(shares))) - set(done):
        stratum, weight = population.strata_N[document], population.weights_N[document]
        within = weight / evidence.unseen_RH[0, stratum]
        after = copy.deepcopy(evidence)
        after.observe(np.array([stratum]), shares[[document]], population.weights_N[[document]], scores)
        yield from all_paths(population, shares, after, (*done, document), chance * probabilities[stratum] * within)


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
    values = np.array([path.values_TR for _, path in paths])[:, :, 0]
    stakes = np.array([path.stakes_TSKR for _, path in paths])[..., 0]
    assert chances @ values == pytest.approx(np.full(len(shares), truth))  # Z_t of every t
    for side in (ABOVE,) if shift > 0 else (BELOW,) if shift < 0 else (ABOVE, BELOW):
        gains = 1 + SIGNS[side] * stakes[:, :, side] * (values - truth)[:, :, None]
        assert gains.min() > 0
        wealth = gains.cumprod(axis=1)
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
            low, high = limits(path, 0.6)  # what was ever rejected stays so
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
        together.observe(*where, scores)
        for run, evidence in enumerate(alone):
            evidence.observe(*(array[[run]] for array in where), evidence.scores())
            assert evidence.values_TR[-1][0] == together.values_TR[-1][run]
    assert together.peaks_SR.tolist() == np.concatenate([one.peaks_SR for one in alone], axis=1).tolist()


def test_guard_draws_sure_strata_often_enough_for_the_stakes() -> None:
    population = difference_population(np.ones(1000), np.arange(1000.0))
    evidence = Evidence(population, -0.01, 0.01)
    for document in range(0, 1000, 10):  # nothing flips: all strata are believed to be sure
        stratum = population.strata_N[[document]]
        evidence.observe(stratum, np.ones(1), np.full(1, 0.001), evidence.scores())
    assert evidence.scores().min() >= 0.05


def limits(evidence: Evidence, confidence: float) -> tuple[float, float]:
    low, high = (evidence.limit(side, 0, (-1, 1), confidence) for side in (ABOVE, BELOW))
    return low, high


def drawn_bets(bound: float, num_draws: int = 150) -> Evidence:
    """Bets of one run on answers without any loss, drawn at random."""
    random = np.random.default_rng(3)
    reference = (random.random(1000) < 0.7).astype(float)
    population = difference_population(reference, random.random(1000))
    evidence = Evidence(population, bound, 0.05)
    for document in random.permutation(1000)[:num_draws]:
        where = population.strata_N[[document]], reference[[document]], population.weights_N[[document]]
        evidence.observe(*where, population.unseen_H[None] * 0 + 1)
    return evidence


def test_limits_are_those_of_a_grid() -> None:
    evidence = drawn_bets(-0.05, 60)
    low, high = limits(evidence, 0.95)
    values, stakes = np.array(evidence.values_TR), np.array(evidence.stakes_TSKR)[..., 0]
    for side, found, grid in ((ABOVE, low, np.linspace(-0.3, -0.05, 400)), (BELOW, high, np.linspace(-0.05, 0.3, 400))):
        gains = SIGNS[side] * stakes[:, side, :, None] * (values - grid)[:, None]
        wealth = np.tensordot(np.exp(np.log1p(gains).cumsum(axis=0)), [0.25, 0.5, 0.25], axes=(1, 0)).max(axis=0)
        kept = grid[wealth < 20]
        assert found == pytest.approx(kept.min() if side == ABOVE else kept.max(), abs=0.001)
    assert evidence.peaks_SR[ABOVE, 0] < np.log(20)


def test_evidence_that_reaches_the_level_ends_the_interval_at_the_bound() -> None:
    evidence = drawn_bets(-0.05)
    assert evidence.peaks_SR[ABOVE, 0] > np.log(20)
    low, high = limits(evidence, 0.95)
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
