"""Size, memory and speed as metrics of one evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig
from olive_ext.report import Metric, Report
from olive_ext.run import evaluate
from olive_ext.run.bounds import cost_metrics
from tests.backends.local_tasks import NAMES, write_tasks
from tests.backends.reference import ForwardEngine, hflm, ort_lm


def costs(lm: Any, folder: Path) -> tuple[Report, dict[str, Metric]]:
    given = {"tasks": [*NAMES, "peak_memory", "tokens_per_second"], "include_path": str(folder), "bootstrap_iters": 0}
    report = evaluate(EvaluationConfig.parse({"model": {"path": "nowhere"}, **given}), lm=lm)
    return report, {metric.task: metric for metric in report.metrics}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def test_metrics_that_are_not_asked_for_are_not_there(folder: Path) -> None:
    report = evaluate(
        EvaluationConfig.parse(
            {"model": {"path": "x"}, "tasks": ["tiny_choice"], "include_path": str(folder), "bootstrap_iters": 0}
        ),
        lm=ort_lm(),
    )
    assert {metric.task for metric in report.metrics} == {"tiny_choice"}


def test_speed_counts_what_was_asked_and_is_none_of_a_model_that_counted_nothing() -> None:
    counters = {"tokens_naive": 900, "tokens_generated": 100, "requests": 50}
    found = list(cost_metrics(["tokens_per_second"], size=lambda: 0, peak_memory=0, counters=counters, seconds=2.0))
    assert [(metric.task, metric.metric, metric.value, metric.higher_is_better) for metric in found] == [
        ("tokens_per_second", "tokens_per_second", 500.0, True),
        ("requests_per_second", "requests_per_second", 25.0, True),
    ]
    asked = ["tokens_per_second", "peak_memory"]
    for nothing in ({}, {"requests": 0, "tokens_naive": 0}):
        none = cost_metrics(asked, size=lambda: 0, peak_memory=7, counters=nothing, seconds=2.0)
        assert [metric.task for metric in none] == ["peak_memory"]


def test_speed_of_lm_evals_own_model_is_not_told(folder: Path) -> None:
    report, found = costs(hflm(), folder)
    assert "peak_memory" in found
    assert not {"tokens_per_second", "requests_per_second"} & set(found)
    assert "tokens_naive" not in report.engine


def test_memory_and_speed_are_metrics_beside_quality(folder: Path) -> None:
    engine = ForwardEngine()
    engine.counters.tokens_naive, engine.counters.requests = 1000, 36
    report, found = costs(ort_lm(engine=engine), folder)
    assert found["peak_memory"].value > 50e6
    assert not found["peak_memory"].higher_is_better
    seconds = report.engine["seconds_candidate"]
    assert found["tokens_per_second"].value == pytest.approx(1000 / seconds)
    assert found["requests_per_second"].value == pytest.approx(36 / seconds)
