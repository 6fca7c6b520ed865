"""What an evaluation costs as metrics and phases, its machine, and the peak memory of a piece of work."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from olive_ext.config import EvaluationConfig
from olive_ext.report import Metric, Report
from olive_ext.run import evaluate
from olive_ext.run.bounds import cost_metrics
from olive_ext.run.machine import Clock, PeakMemory, describe_hardware
from tests.backends.local_tasks import NAMES, write_tasks
from tests.backends.reference import ForwardEngine, hflm, ort_lm


def costs(lm: Any, folder: Path) -> tuple[Report, dict[str, Metric]]:
    given = {"tasks": [*NAMES, "peak_memory", "tokens_per_second"], "include_path": str(folder), "bootstrap_iters": 0}
    report = evaluate(EvaluationConfig.parse({"model": {"path": "nowhere"}, **given}), lm=lm)
    return report, {metric.task: metric for metric in report.metrics}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


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


def inner(clock: Clock) -> None:
    """A phase inside of another is not counted twice."""
    with clock.phase("reference"), clock.phase("load"):
        pass


def failing(clock: Clock) -> None:
    """A phase that fails is counted and ended."""
    with suppress(ValueError), clock.phase("candidate"):
        raise ValueError
    with clock.phase("statistics"):
        pass


def moved(clock: Clock) -> None:
    """What was measured inside of a phase moves."""
    with clock.phase("candidate"):
        pass
    clock.move(2.0, "candidate", "reference")


def test_long_phase_without_a_word_is_told_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with clock.reporting(True, every=0.05), clock.phase("export"):
        time.sleep(0.4)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 8
    assert lines[0].startswith("olive-ext: exporting ")
    with clock.reporting(False, every=0.05):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_facts_are_json_and_tell_processor_memory_and_system() -> None:
    facts = json.loads(json.dumps(describe_hardware()))
    assert {"cpu", "threads", "memory_bytes", "os", "python"} <= set(facts)
    assert 1 <= facts["usable_threads"] <= (os.cpu_count() or 1)
    assert facts["memory_bytes"] > 1e8


def test_memory_that_is_gone_again_counts() -> None:
    before = psutil.Process().memory_info().rss
    with PeakMemory() as peak:
        block = np.ones(25_000_000)
        time.sleep(0.3)  # many looks, on a busy machine as well
        del block
    assert 190e6 < peak.bytes - before < 400e6


def test_memory_of_before_does_not_count() -> None:
    block = np.ones(50_000_000)
    del block
    with PeakMemory() as peak:
        pass
    assert abs(peak.bytes - psutil.Process().memory_info().rss) < 100e6
