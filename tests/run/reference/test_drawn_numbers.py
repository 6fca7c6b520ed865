"""Numbers of drawn documents in a report: the sentence, estimates of groups, and what may not be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olive_ext.config import Bound
from olive_ext.errors import ConfigError
from olive_ext.report import Metric, from_json, to_json
from olive_ext.report.comparison import ALL, ClaimResult, Comparison
from olive_ext.report.html.render import to_html
from olive_ext.report.metrics import comparison_metrics
from olive_ext.report.page import check_comparable
from olive_ext.report.verdict import verdict
from olive_ext.run.bounds import broken_bounds
from olive_ext.run.reference.sampled_run import certain_comparison, sampled_metrics
from olive_ext.stats.paired_answers import compare_outcomes
from tests.refusals import refused
from tests.report.synthetic import comparison, report
from tests.report.test_comparison import divergence

WHOLE = (ALL, "accuracy", "none")
CERTAIN = "is certain (95 % for this model)"
STOPPED = "342 of 10,042 documents, stopped"


def certainty(**changes: Any) -> ClaimResult:
    made = ClaimResult("accuracy_difference", "above", -0.01, 0.95, "ok", -0.001, -0.01, 0.02, 342, 10042, "a", WHOLE)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, f"{STOPPED}: loss below 1 point {CERTAIN}"),
        ({"verdict": "loss"}, f"{STOPPED}: loss above 1 point {CERTAIN}"),
        ({"side": "below"}, f"{STOPPED}: loss above 1 point {CERTAIN}"),
        ({"bound": 0.02, "confidence": 0.9}, f"{STOPPED}: gain above 2 points {CERTAIN.replace('95', '90')}"),
        ({"num_evaluated": 10_042}, "all 10,042 documents: loss below 1 point"),
        (
            {"num_evaluated": 10_042, "verdict": "unknown", "num_unknown": 2},
            "all 10,042 documents, 2 without an answer: loss below 1 point is not certain",
        ),
        ({"metric": "kl_mean", "side": "below", "bound": 0.05}, f"{STOPPED}: KL below 0.05 nats {CERTAIN}"),
        (
            {"metric": "kl_mean", "side": "below", "bound": 0.02, "cut": 1.0, "beyond_cut": 0.0252},
            f"{STOPPED}: KL below 0.02 nats {CERTAIN}, of positions cut at 1 nat: 0.025 nats lie beyond",
        ),
        ({"metric": "top1_agreement", "bound": 0.9}, f"{STOPPED}: top-1 agreement above 90 % {CERTAIN}"),
    ],
)  # fmt: skip
def test_sentence_says_what_is_certain(changes: dict[str, Any], sentence: str) -> None:
    assert certainty(**changes).sentence() == sentence


def drawn(task: str, reference: float, count: int, shift: float) -> Any:
    whole = (np.arange(count) < reference * count).astype(float)
    first = whole[::4]
    second = np.where(np.arange(len(first)) < shift * len(first), 1 - first, first)
    return compare_outcomes(task, "acc", "none", first, second, whole=whole, weights=np.full(len(first), 4.0))


GROUPS = {"group_subtasks": {"both": ["one", "two"]}}


def reference_results(group: float) -> dict[str, Any]:
    values = {"one": {"acc,none": 0.6, "sample_len": 100}, "two": {"acc,none": 0.8, "sample_len": 300}}
    return {"results": {**values, "both": {"acc,none": group, "sample_len": 400}}}


def metrics_of(group: float) -> dict[str, Metric]:
    outcomes = drawn("one", 0.6, 100, 0.2), drawn("two", 0.8, 300, 0.04)
    found = Comparison({}, outcomes=outcomes, metrics=reference_results(group), certainty=certainty())
    metrics = [Metric("one", "acc", "none", 0.1, n=25), Metric("two", "acc", "none", 0.1, n=75)]
    sampled = sampled_metrics([*metrics, Metric("both", "acc", "none", 0.1, n=100)], found, GROUPS)
    return {item.task: item for item in sampled}


def test_groups_are_estimated_by_their_tasks_documents() -> None:
    """One that weighs its tasks alike is of the drawn documents alone."""
    found = metrics_of(0.75)
    assert found["one"].value == pytest.approx(0.6 - 0.2)
    assert found["two"].value == pytest.approx(0.8 - 0.04)
    assert found["both"].value == pytest.approx(0.75 - (100 * 0.2 + 300 * 0.04) / 400)
    assert found["both"].documents == "100 of 400"
    alike = metrics_of(0.7)["both"]
    assert (alike.value, alike.is_estimate, alike.documents) == (0.1, False, "100 of 400, unweighted")


def sampled_report(**changes: Any) -> Any:
    made = report("models/a", comparison(50))
    outcomes = tuple(replace(item, num_population=10_042) for item in made.comparison.outcomes)
    found = certain_comparison(replace(made.comparison, outcomes=outcomes), certainty(**changes))
    return replace(made, comparison=found)


def test_interval_has_the_error_of_all_documents_beside_that_of_the_draws() -> None:
    overall = sampled_report().comparison.overall_outcome()
    assert overall.difference == certainty().estimate
    flipped = (overall.right_to_wrong + overall.wrong_to_right) / overall.num_documents
    margin = 1.96 * (flipped / 10_042) ** 0.5
    assert (overall.low, overall.high) == pytest.approx((-0.01 - margin, 0.02 + margin), rel=1e-4)
    told = verdict(replace(sampled_report().comparison, divergences=())).finding
    assert f"accuracy may have lost up to {100 * (0.01 + margin):.2g} pt (on other documents of these tasks)" in told


@pytest.mark.parametrize(("metric", "side", "bound"), [("kl_mean", "below", 0.5), ("top1_agreement", "above", 0.01)])
def test_broken_claim_breaks_its_bound_whatever_the_weighted_mean(metric: str, side: str, bound: float) -> None:
    given = certainty(metric=metric, side=side, bound=bound, verdict="loss", outcome=None)
    metrics = comparison_metrics(certain_comparison(comparison(50), given))
    required = Bound.model_validate({"metric": metric, "max" if side == "below" else "min": bound})
    assert broken_bounds([required], metrics)


def test_report_of_drawn_documents_is_kept_and_shown() -> None:
    made = sampled_report()
    assert from_json(to_json(made)).comparison == made.comparison
    assert "342 of 10,042 documents, stopped" in to_html(made)


def test_unlike_samples_are_not_compared() -> None:
    one, other, whole = sampled_report(), sampled_report(sample="b"), report("models/c", comparison(50))
    check_comparable([("one", one), ("same", sampled_report())])
    for second in other, whole:
        with refused(ConfigError, "not_comparable", holds="one"):
            check_comparable([("one", one), ("other", second)])


def test_few_drawn_documents_leave_a_kept_claim_and_none_need_be_of_a_task() -> None:
    """A larger bound, which draws fewer documents, had a worse status."""
    near = replace(divergence(ALL, kl=1e-3), num_documents=16, num_population=440)
    more = {"metrics": {"configs": {"colours": {}, "letters": {}}}}
    kept = replace(sampled_report().comparison, divergences=(near,), **more)
    assert verdict(kept).status == "ok"
    wide = replace(near, num_documents=32, kl=replace(near.kl, stderr=3.0))
    assert verdict(replace(kept, divergences=(wide,))).code == "distance_open"
    assert "no_values" in [reason.code for reason in verdict(replace(kept, certainty=None)).reasons]
