"""A claim that is kept decides what drawn documents leave undecided: no other finding of a generated comparison is
better for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olive_ext.report.comparison import ALL, ClaimResult, Comparison, Divergence, Outcome
from olive_ext.report.html.render import TONES, tone_of
from olive_ext.report.verdict import EXIT_STATUS, STATUSES, Status, Verdict, verdict
from olive_ext.run.reference.sampled_run import certain_comparison
from olive_ext.stats.paired_answers import compare_outcomes
from olive_ext.stats.stopping import Claim, Sampler, difference_population
from tests.report.test_comparison import divergence, outcome

CODES = [*STATUSES]
COLOURS = ("loss", "doubt", "plain", "unclear", "fine", "gain")
"""Classes of a page, from the worst on."""

WHOLE = (ALL, "accuracy", "none")


def one_in(share: int) -> st.SearchStrategy[bool]:
    return st.integers(1, share).map(lambda value: value == 1)


@st.composite
def outcomes(draw: Any, task: str, metric: str) -> Outcome:
    flips = draw(st.sampled_from([(0, 0), (4, 2), (40, 1)]))
    estimate = draw(st.floats(-0.1, 0.05)) if any(flips) else 0.0
    below, above = (draw(st.floats(0, 0.1)) for _ in range(2))
    p, is_binary = draw(st.sampled_from([1.0, 0.2, 0.001])), draw(st.booleans()) or task == ALL
    low = math.nan if draw(one_in(30)) else estimate - below
    found = outcome(task, metric, difference=estimate, low=low, high=estimate + above, mcnemar_p=p, is_binary=is_binary)
    found = replace(found, right_to_wrong=flips[0], wrong_to_right=flips[1])
    return replace(found, num_documents=draw(st.sampled_from([6, 400, 10_000])), higher_is_better=draw(st.booleans()))


@st.composite
def divergences(draw: Any, task: str) -> Divergence:
    kl = draw(st.sampled_from([0.0, 1e-9, 0.005, 0.05, 0.2, 0.5, 3.0, math.nan, math.inf]))
    found = divergence(
        task,
        kl,
        top1_agreement=draw(st.sampled_from([1.0, 0.97, 0.9, 0.75, 0.3])),
        perplexity_ratio=draw(st.sampled_from([0.98, 1.0, 1.002, 1.05, math.inf])) if kl > 1e-6 else 1.0,
        perplexity_ratio_stderr=draw(st.sampled_from([None, 0.0, 0.001, 0.02])),
    )
    return replace(found, kl=replace(found.kl, maximum=found.kl.mean * 3))


@st.composite
def comparisons(draw: Any) -> Comparison:
    names = draw(st.lists(st.sampled_from(["choice", "maths", "wiki", "code"]), unique=True, max_size=3))
    answers = [draw(outcomes(name, "acc")) for name in names if draw(st.booleans())]
    if len(answers) > 1:
        answers.append(draw(outcomes(ALL, "accuracy")))
    distances = [draw(divergences(name)) for name in names if draw(st.booleans())]
    if len(distances) > 1:
        distances.append(draw(divergences(ALL)))
    return Comparison(
        {},
        tuple(distances),
        tuple(answers),
        missing=draw(st.sampled_from([0, 0, 1, 50])),
        non_finite=int(draw(one_in(20))),
        matters=draw(st.sampled_from([0.1, 1.0, 5.0])),
    )


@st.composite
def claims(draw: Any, comparison: Comparison) -> ClaimResult:
    metric = draw(st.sampled_from(["accuracy_difference", "kl_mean", "top1_agreement"]))
    bound = draw(st.sampled_from([-0.05, -0.01, 0.02] if metric == "accuracy_difference" else [0.02, 0.9]))
    ends = sorted(draw(st.floats(-0.1, 1)) for _ in range(3))
    firsts = [(item.task, item.metric, item.filter) for item in comparison.outcomes]
    return ClaimResult(
        metric=metric,
        side=draw(st.sampled_from(["above", "below"])),
        bound=bound,
        confidence=0.95,
        verdict=draw(st.sampled_from(["ok", "ok", "loss", "unknown"])),
        estimate=ends[1],
        low=ends[0],
        high=ends[2],
        num_evaluated=draw(st.sampled_from([5, 6])),
        num_documents=6,
        sample="a",
        outcome=draw(st.sampled_from([None, *firsts])) if metric == "accuracy_difference" else None,
        num_unknown=draw(st.integers(0, 2)),
        cut=1.0 if metric == "kl_mean" else None,
        beyond_cut=draw(st.sampled_from([0.0, 0.03])),
    )


def is_better(found: Verdict, other: Verdict) -> bool:
    """In words or in colour."""
    nothing = "nothing_compared"
    return found.code != nothing != other.code and (
        CODES.index(found.code) > CODES.index(other.code)
        or COLOURS.index(tone_of(found)) > COLOURS.index(tone_of(other))
    )


def is_green(found: Verdict) -> bool:
    return COLOURS.index(tone_of(found)) > COLOURS.index("doubt")


@settings(max_examples=2 * settings().max_examples)
@given(st.data())
def test_claim_makes_no_verdict_better_but_one_of_too_few_documents(data: st.DataObject) -> None:
    comparison = data.draw(comparisons())
    claim = data.draw(claims(comparison))
    before = verdict(comparison)
    for after in verdict(replace(comparison, certainty=claim)), verdict(certain_comparison(comparison, claim)):
        is_decided = before.code == "too_few" and claim.verdict == "ok" and not comparison.missing
        known = {"claim_kept", *(item.code for item in before.reasons)}  # what too few documents stood before
        assert not is_better(after, before) or (is_decided and after.code in known)
        if before.code not in ("cannot_tell", "nothing_compared"):
            assert claim.sentence() in after.finding


@given(comparisons(), st.integers(1, 500))
def test_missing_answers_never_make_a_verdict_better(comparison: Comparison, more: int) -> None:
    found = verdict(replace(comparison, missing=comparison.missing + more))
    assert not is_better(found, verdict(comparison))


def test_every_status_has_a_colour_and_an_exit_status() -> None:
    assert TONES.keys() >= set(get_args(Status)) == EXIT_STATUS.keys()
    assert set(TONES.values()) <= set(COLOURS)


@pytest.mark.long
@pytest.mark.parametrize("kl", [0.095, 0.12])
def test_distances_of_drawn_documents_are_not_greener_than_those_of_all(kl: float) -> None:
    """A tenth of the documents has all of the distance, and no answer is another one."""
    random, count, green = np.random.default_rng(0), 1000, 0
    distances = np.where(random.permutation(count) < count // 10, 10 * kl, 0.0)
    whole = divergence(ALL, kl=kl, top1_agreement=0.97, perplexity_ratio=1.0, perplexity_ratio_stderr=0.0)
    reference = (random.random(count) < 0.7).astype(float)
    for seed in range(20):
        _, part, drawn = sampled(reference, reference, 0.004, seed)
        assert part.certainty is not None
        mean, stderr = distances[drawn].mean(), distances[drawn].std() / math.sqrt(len(drawn))
        found = replace(whole, num_documents=len(drawn), kl=replace(whole.kl, mean=mean, stderr=stderr))
        comparison = certain_comparison(replace(part, divergences=(found,)), part.certainty)
        green += is_green(verdict(comparison))
    assert verdict(Comparison({}, (whole,))).code == "distant"
    assert green <= 1


def sampled(
    reference: np.ndarray, candidate: np.ndarray, bound: float, seed: int
) -> tuple[Comparison, Comparison, list[int]]:
    """The comparison of all documents, and that of drawn ones with the claim of a loss of at most `bound`; these."""
    sampler = Sampler(difference_population(reference, np.zeros(len(reference))), Claim(-bound, "above", bound), seed)
    drawn: list[int] = []
    while sampler.asks:
        batch = sampler.next_batch().tolist()
        drawn += batch
        sampler.update(candidate[batch] - reference[batch])
    decision, weights = sampler.decision(), sampler.representation()
    whole = compare_outcomes(ALL, "accuracy", "none", reference, candidate)
    both, stands_for = (reference[drawn], candidate[drawn]), [weights[item] for item in drawn]
    part = compare_outcomes(*WHOLE, *both, whole=reference, weights=stands_for)
    claim = ClaimResult("accuracy_difference", "above", -bound, 0.95, **decision, sample="a", outcome=WHOLE)
    return Comparison({}, (), (whole,)), certain_comparison(Comparison({}, (), (part,)), claim), drawn


@pytest.mark.parametrize("bound", [0.05, 0.01, 0.004])
@pytest.mark.parametrize("count", [6, *(pytest.param(count, marks=pytest.mark.long) for count in (400, 2000))])
def test_drawn_documents_are_not_greener_than_all_but_by_a_claim_that_is_true(count: int, bound: float) -> None:
    random, better, green, num_runs = np.random.default_rng(0), 0, 0, 20
    for seed in range(num_runs):
        reference = (random.random(count) < 0.7).astype(float)
        lost, won = random.choice([0.0, 0.005, 0.02, 0.08]), random.choice([0.0, 0.01])
        candidate = np.where(reference == 1, random.random(count) >= lost, random.random(count) < won).astype(float)
        whole, part, _ = sampled(reference, candidate, bound, seed)
        found, loss = verdict(part), reference.mean() - candidate.mean()
        green += is_green(found)
        is_true = found.code == "claim_kept" and loss <= bound + 1e-9
        better += is_green(found) and not is_true and not is_green(verdict(whole))
    assert better <= 0.05 * num_runs
    assert green or count < 2000 or bound > 0.005, (
        "a claim that leaves room for the error of all documents can be green"
    )
