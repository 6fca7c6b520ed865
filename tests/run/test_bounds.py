"""Bounds on metrics: kept, broken, unknown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from olive_ext.config import Bound
from olive_ext.errors import ConfigError
from olive_ext.report import Metric
from olive_ext.report.comparison import Certainty, Comparison
from olive_ext.report.metrics import comparison_metrics
from olive_ext.run.bounds import broken_bounds
from tests.report.synthetic import comparison
from tests.report.test_comparison import outcome

METRICS = [
    Metric("choice", "acc", "none", 0.5),
    Metric("letters", "acc", "none", 0.75),
    Metric("letters", "kl_mean", "none", 0.5, higher_is_better=False),
    Metric("all", "kl_mean", "none", 0.03125, higher_is_better=False),
    Metric("generate", "exact_match", "strict", 0.125),
    Metric("generate", "exact_match", "loose", 0.75),
    Metric("size_on_disk", "bytes", "none", 1_200_000, higher_is_better=False),
    Metric("broken", "f1", "none", math.nan),
]


def bound(**values: Any) -> Bound:
    return Bound.parse(values)


@pytest.mark.parametrize(
    "kept",
    [
        bound(metric="acc", task="choice", min=0.5, max=0.5),
        bound(metric="kl_mean", max=0.04),
        bound(metric="kl_mean", task="letters", min=0.4),
        bound(metric="exact_match", task="generate", filter="loose", min=0.7),
        bound(metric="size_on_disk", max=2e6),
        bound(metric="letters/acc", min=0.7),
    ],
)
def test_nothing_is_said_of_a_bound_that_is_kept(kept: Bound) -> None:
    assert broken_bounds([kept], METRICS) == []


def test_each_broken_bound_has_its_line_with_the_value_and_the_bound() -> None:
    bounds = [
        bound(metric="kl_mean", max=0.02),
        bound(metric="acc", task="letters", min=0.8, max=0.9),
        bound(metric="exact_match", filter="strict", min=0.5),
        bound(metric="bytes", max=1e6),
    ]
    assert broken_bounds(bounds, METRICS) == [
        "all/kl_mean = 0.0312, required at most 0.0200",
        "letters/acc = 0.7500, required at least 0.8000",
        "generate/exact_match,strict = 0.1250, required at least 0.5000",
        "size_on_disk/bytes = 1200000, required at most 1000000",
    ]


def test_value_that_is_no_number_breaks_every_bound() -> None:
    assert broken_bounds([bound(metric="f1", min=0, max=1)], METRICS) == [
        "broken/f1 = nan, required at most 1",
        "broken/f1 = nan, required at least 0",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metric": "acc", "max": 1}, "'acc' stands for several metrics: choice/acc, letters/acc"),
        ({"metric": "f2", "task": "choice", "max": 1}, "'f2' of task 'choice' is not among the results: choice/acc"),
        (
            {"metric": "tokens_per_second", "min": 1},
            "'tokens_per_second' was not measured, because the model counts no requests, or answered none of them",
        ),
        (
            {"metric": "requests_per_second", "task": "requests_per_second", "min": 1},
            "'requests_per_second' of task 'requests_per_second' was not measured, because the model counts no",
        ),
        (
            {"metric": "exact_match", "max": 1},
            "'exact_match' stands for several metrics: generate/exact_match,strict, ",
        ),
    ],
)
def test_bound_on_no_metric_or_on_several_is_refused_with_what_there_is(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        broken_bounds([bound(**values)], METRICS)
    assert f"'require': {message}" in str(raised.value)


def test_digits_tell_a_value_from_its_bound() -> None:
    metrics = [Metric("all", "kl_mean", "none", 0.02000004, higher_is_better=False)]
    assert broken_bounds([bound(metric="kl_mean", max=0.02)], metrics) == [
        "all/kl_mean = 0.02000004, required at most 0.0200"
    ]


def test_number_of_drawn_documents_alone_holds_no_bound() -> None:
    drawn = Metric("wiki", "word_perplexity", "none", 9.0, n=5, num_population=40, is_estimate=False)
    (line,) = broken_bounds([bound(metric="word_perplexity", max=10)], [drawn])
    assert line.startswith("wiki/word_perplexity is of the drawn documents alone (5 of 40, unweighted): no bound")
    for whole in replace(drawn, is_estimate=True), replace(drawn, n=40), replace(drawn, num_population=None):
        assert broken_bounds([bound(metric="word_perplexity", max=10)], [whole]) == []


def test_claim_that_is_open_breaks_bounds_on_its_metric_alone() -> None:
    metrics = [Metric("all", "accuracy_difference", "none", 0.0), *METRICS]
    metrics.append(Metric("open_claim", "open_claim_accuracy_difference", "none", 1.0, higher_is_better=False))
    asked = [bound(metric="accuracy_difference", min=-0.5), bound(metric="kl_mean", max=0.04)]
    assert broken_bounds(asked, metrics) == [
        "all/accuracy_difference is not certain: what is not known of the documents would decide"
    ]


@pytest.mark.parametrize(("tasks", "is_open"), [(("choice",), True), (("choice", "letters", "all"), False)])
def test_open_claim_meets_no_bound_on_its_only_task(tasks: Sequence[str], is_open: bool) -> None:
    """Whose numbers are those over all tasks."""
    outcomes = tuple(outcome(task, "acc", difference=-0.004) for task in tasks)
    claimed = (tasks[-1], "acc", "none")
    claim = Certainty(
        "accuracy_difference", "above", -0.01, 0.95, "open", -0.004, -0.02, 0.01, 6, 6, "a", claimed, num_unknown=2
    )
    metrics = comparison_metrics(Comparison({}, (), outcomes, certainty=claim))
    for asked in {"task": "choice"}, {"metric": "choice/accuracy_difference"}:
        found = broken_bounds([bound(**{"metric": "accuracy_difference", "min": -0.01, **asked})], metrics)
        assert bool(found) == is_open
    assert broken_bounds([bound(metric="accuracy_difference", min=-0.01)], metrics)


def test_bounds_on_all_metrics_of_a_whole_comparison_are_judged_by_their_values() -> None:
    metrics = comparison_metrics(comparison(400))
    for metric in metrics:
        if metric.task == "all":
            kept = bound(metric=metric.metric, task="all", min=metric.value, max=metric.value)
            assert broken_bounds([kept], metrics) == []
