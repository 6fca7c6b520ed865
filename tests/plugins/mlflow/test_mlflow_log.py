"""Evaluations in MLflow: names it takes, runs inside of a workflow's, every failure a warning."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from olive_ext.plugins.mlflow.mlflow_log import (
    VARIABLE,
    legal_name,
    log_cached,
    logged_run,
    metrics_of,
    params_of,
    tags_of,
)
from olive_ext.report import Metric, Report
from olive_ext.report import write as write_report
from tests.report.synthetic import comparison, report


class FakeMlflow:
    """Notes what is logged, by run."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.runs: dict[str, dict[str, Any]] = {}
        self.open: list[str] = []

    def active_run(self) -> Any:
        return self._run(self.open[-1]) if self.open else None

    def start_run(self, run_name: str = "", nested: bool = False) -> Any:
        assert nested == bool(self.open)
        run_id = str(len(self.runs))
        tags = {"mlflow.parentRunId": self.open[-1]} if nested else {}
        self.runs[run_id] = {"name": run_name, "tags": tags, "params": {}, "metrics": [], "files": []}
        self.runs[run_id]["status"] = "RUNNING"
        self.open.append(run_id)
        return self._run(run_id)

    def end_run(self, status: str) -> None:
        self.runs[self.open.pop()]["status"] = status

    def _run(self, run_id: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id), data=SimpleNamespace(**self.runs[run_id]))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.runs[self.open[-1]]["tags"].update(tags)

    def log_params(self, params: Mapping[str, str]) -> None:
        if self.error is not None:
            raise self.error
        run = self.runs[self.open[-1]]
        assert not set(run["params"]) & set(params)
        run["params"].update(params)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0, run_id: str | None = None) -> None:
        self.runs[run_id or self.open[-1]]["metrics"] += [(name, step, value) for name, value in metrics.items()]

    def log_artifact(self, path: str) -> None:
        assert Path(path).is_file()
        self.runs[self.open[-1]]["files"].append(Path(path).name)


def log(fake: FakeMlflow, made: Report, folder: Path | None = None) -> None:
    with logged_run("m", mlflow=fake) as run:
        run.log(made, None if folder is None else str(folder), None if folder is None else str(folder))


@pytest.fixture(autouse=True)
def _uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)


def test_params_metrics_tags_and_files_are_logged_as_one_run(tmp_path: Path) -> None:
    fake, made = FakeMlflow(), report(found=comparison(20))
    write_report(made, tmp_path)
    (tmp_path / "samples_arc_easy.jsonl").touch()
    log(fake, made, tmp_path)
    run = fake.runs["0"]
    assert run["status"] == "FINISHED"
    assert run["files"] == ["report.json", "report.md", "report.html", "samples_arc_easy.jsonl"]
    assert ("size_on_disk/bytes", 0, 1_111_720.0) in run["metrics"]
    assert "quickstart_choice/acc_norm_stderr" in {name for name, _, _ in run["metrics"]}
    assert run["params"]["config.model.path"] == "models/int4"
    assert run["tags"]["mlflow.runName"] == "int4"
    assert run["tags"]["olive_ext.version.onnxruntime"] == "1.31.1"
    assert run["tags"]["olive_ext.verdict"] == tags_of(made)["olive_ext.verdict"]


def test_report_that_was_not_written_is_logged_all_the_same_and_nothing_without_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, fake = dict(os.environ), FakeMlflow()
    log(fake, report())
    assert fake.runs["0"]["files"] == ["report.json", "report.md", "report.html"]
    assert dict(os.environ) == before
    monkeypatch.delenv(VARIABLE)
    log(silent := FakeMlflow(), report())
    assert silent.runs == {}


def test_evaluations_of_a_workflow_are_children_and_their_metrics_steps_of_the_parent(tmp_path: Path) -> None:
    fake = FakeMlflow()
    (tmp_path / "chain.md").touch()
    with logged_run("workflow", is_parent=True, mlflow=fake) as parent:
        parent.files += [tmp_path / "chain.md", tmp_path / "chain.json"]
        for value in (0.5, 0.25):
            log(fake, Report(metrics=(Metric("t", "acc", "none", value),)))
    assert fake.runs["0"]["metrics"] == [("t/acc", 0, 0.5), ("t/acc", 1, 0.25)]
    assert fake.runs["0"]["files"] == ["chain.md"]
    assert [fake.runs[name]["tags"]["mlflow.parentRunId"] for name in "12"] == ["0", "0"]
    assert fake.runs["2"]["metrics"] == [("t/acc", 0, 0.25)]


def test_evaluation_from_a_cache_has_one_run_in_each_workflow() -> None:
    fake, made = FakeMlflow(), report()
    with logged_run("workflow", is_parent=True, mlflow=fake):
        log(fake, made)
        log_cached(lambda: made)
    assert len(fake.runs) == 2
    with logged_run("workflow", is_parent=True, mlflow=fake):
        log_cached(lambda: made)
    assert fake.runs["3"]["tags"]["mlflow.parentRunId"] == "2"
    assert fake.runs["3"]["metrics"] == fake.runs["1"]["metrics"]
    log_cached(lambda: made)  # outside of a workflow
    assert len(fake.runs) == 4


@pytest.mark.parametrize(("error", "status"), [(ValueError(), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_run_ends_as_the_evaluation_does(error: BaseException, status: str) -> None:
    fake = FakeMlflow()
    with pytest.raises(type(error)), logged_run("m", mlflow=fake):
        raise error
    assert fake.runs["0"]["status"] == status


def test_names_become_legal_and_stay_different() -> None:
    for name, legal in (
        ("gsm8k\0exact_match\0strict-match", "gsm8k/exact_match/strict-match"),
        ("a/../b\0p@1,x", "a_.._b/p_1_x"),
        ("..\0\0\u00e9", "_/_/_"),
    ):
        assert legal_name(name) == legal
    metrics = [Metric(task, "acc", "none", 0.5) for task in ("a@b", "a#b", "x" * 300 + "1", "x" * 300 + "2")]
    names = list(metrics_of(Report(metrics=tuple(metrics))))
    assert len(set(names)) == 4
    assert max(map(len, names)) <= 250


def test_numbers_that_are_not_finite_and_long_values_are_kept_out() -> None:
    made = Report(
        metrics=(Metric("t", "m", "none", math.nan), Metric("t", "n", "none", math.inf)), config={"x": "y" * 9000}
    )
    assert metrics_of(made) == {}
    assert len(params_of(made)["config.x"]) == 500


@pytest.mark.parametrize("error", [RuntimeError("server\nis down"), ImportError("No module named 'mlflow'")])
def test_failure_is_one_warning(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log(FakeMlflow(error), report())
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
