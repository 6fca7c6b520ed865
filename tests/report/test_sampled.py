"""Numbers of drawn documents in a report: the sentence, estimates of groups, and what may not be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olive_ext.errors import ConfigError
from olive_ext.report import Metric, from_json, to_json
from olive_ext.report.comparison import Certainty, Comparison
from olive_ext.report.html.render import to_html
from olive_ext.report.page import check_comparable
from olive_ext.report.sampled import certain_comparison, sampled_metrics
from olive_ext.report.verdict import verdict
from olive_ext.stats.paired_answers import sampled_outcome
from tests.report.synthetic import comparison, report

STOPPED = "342 of 10,042 documents, stopped"


def certainty(**changes: Any) -> Certainty:
    found = Certainty("accuracy_difference", "above", -0.01, 0.95, "kept", -0.001, -0.01, 0.02, 342, 10_042, "a")
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "342 of 10,042 documents, stopped: loss below 1 point is certain (95 %)"),
        ({"verdict": "broken"}, "342 of 10,042 documents, stopped: loss above 1 point is certain (95 %)"),
        ({"side": "below"}, "342 of 10,042 documents, stopped: loss above 1 point is certain (95 %)"),
        ({"bound": 0.02, "confidence": 0.9}, "342 of 10,042 documents, stopped: gain above 2 points is certain (90 %)"),
        ({"num_evaluated": 10_042}, "all 10,042 documents: loss below 1 point"),
        ({"metric": "kl_mean", "side": "below", "bound": 0.05}, f"{STOPPED}: KL below 0.05 nats is certain (95 %)"),
        ({"metric": "top1_agreement", "bound": 0.9}, f"{STOPPED}: top-1 agreement above 90 % is certain (95 %)"),
    ],
)  # fmt: skip
def test_sentence_says_what_is_certain(changes: dict[str, Any], sentence: str) -> None:
    assert certainty(**changes).sentence() == sentence


def drawn(task: str, reference: float, count: int, shift: float) -> Any:
    whole = (np.arange(count) < reference * count).astype(float)
    first = whole[::4]
    second = np.where(np.arange(len(first)) < shift * len(first), 1 - first, first)
    return sampled_outcome(task, "acc", "none", whole, first, second, np.full(len(first), 4.0))


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
    found = metrics_of(0.75)
    assert found["one"].value == pytest.approx(0.6 - 0.2)
    assert found["two"].value == pytest.approx(0.8 - 0.04)
    assert found["both"].value == pytest.approx(0.75 - (100 * 0.2 + 300 * 0.04) / 400)
    assert found["both"].documents == "100 of 400"


def test_group_that_weighs_its_tasks_alike_is_of_the_drawn_documents_alone() -> None:
    found = metrics_of(0.7)["both"]
    assert (found.value, found.is_estimate) == (0.1, False)
    assert found.documents == "100 of 400, unweighted"


def sampled_report(**changes: Any) -> Any:
    made = report("models/a", comparison(50))
    assert made.comparison is not None
    return replace(made, comparison=certain_comparison(made.comparison, certainty(**changes)))


def test_verdict_and_figures_are_those_that_decided() -> None:
    for changes, kind in ({}, "no_loss_found"), ({"verdict": "broken", "estimate": -0.03, "high": -0.01}, "loss"):
        found = sampled_report(**changes).comparison
        assert verdict(found).line.startswith(found.certainty.sentence())
        assert verdict(found).kind in (kind, "distant", "too_few", "loss")
        overall = found.overall_outcome()
        assert (overall.difference, overall.low) == (found.certainty.estimate, found.certainty.low)


def test_distribution_is_held_to_the_certain_side() -> None:
    held = certainty(metric="kl_mean", side="below", bound=1e-5)
    found = certain_comparison(comparison(50), held).overall_divergence()
    assert found is not None
    assert found.kl.mean == 1e-5


def test_report_of_drawn_documents_is_kept_and_shown() -> None:
    made = sampled_report()
    assert from_json(to_json(made)).comparison == made.comparison
    assert "342 of 10,042 documents, stopped" in to_html(made)


def test_unlike_samples_are_not_compared() -> None:
    one, other, whole = sampled_report(), sampled_report(sample="b"), report("models/c", comparison(50))
    check_comparable([("one", one), ("same", sampled_report())])
    for second in other, whole:
        with pytest.raises(ConfigError, match="sample of documents is 'a' in 'one' and"):
            check_comparable([("one", one), ("other", second)])
