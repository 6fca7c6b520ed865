"""Reports in MLflow: names it takes, every failure a warning; and, with the extra mlflow, in a real store."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from olive_ext.report import Metric, Report, from_json
from olive_ext.report import write as write_report
from olive_ext.run.mlflow_log import VARIABLE, legal_name, log_report, metrics_of, params_of
from tests.report.synthetic import comparison, report


class FakeMlflow:
    """Notes what is logged."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.params: dict[str, str] = {}
        self.metrics: dict[str, float] = {}
        self.artifacts: list[str] = []
        self.runs: list[tuple[str, bool]] = []
        self.sizes: list[int] = []

    def active_run(self) -> None:
        return None

    @contextmanager
    def start_run(self, run_name: str, nested: bool) -> Iterator[None]:
        self.runs.append((run_name, nested))
        yield

    def log_params(self, params: Mapping[str, str]) -> None:
        if self.error is not None:
            raise self.error
        self.sizes.append(len(params))
        self.params.update(params)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def log_artifact(self, path: str) -> None:
        assert Path(path).is_file()
        self.artifacts.append(Path(path).name)


@pytest.fixture(autouse=True)
def _uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9")


def test_nothing_is_logged_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    fake = FakeMlflow()
    assert not log_report(report(), mlflow=fake)
    assert fake.runs == []


def test_params_metrics_and_files_are_logged_as_one_run(tmp_path: Path) -> None:
    fake, made = FakeMlflow(), report(found=comparison(20))
    write_report(made, tmp_path)
    assert log_report(made, str(tmp_path), mlflow=fake)
    assert fake.runs == [("quickstart-135m-int4", False)]
    assert fake.artifacts == ["report.json", "report.md", "report.html"]
    assert fake.metrics["size_on_disk/bytes"] == 98e6
    assert "arc_easy/acc_norm_stderr" in fake.metrics
    assert fake.params["config.model.path"] == "models/quickstart-135m-int4"
    assert fake.params["versions.onnxruntime"] == "1.31.1"


def test_report_that_was_not_written_is_logged_all_the_same() -> None:
    fake = FakeMlflow()
    assert log_report(report(), mlflow=fake)
    assert fake.artifacts == ["report.json", "report.md", "report.html"]


def test_many_params_go_in_several_requests() -> None:
    fake = FakeMlflow()
    assert log_report(Report(metrics=(), config={f"k{n}": n for n in range(250)}), mlflow=fake)
    assert fake.sizes == [100, 100, 50]


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("gsm8k\0exact_match\0strict-match", "gsm8k/exact_match/strict-match"),
        ("a/../b\0p@1,x", "a_.._b/p_1_x"),
        ("..\0\0\u00e9", "_/_/_"),
    ],
)
def test_names_become_legal(name: str, legal: str) -> None:
    assert legal_name(name) == legal


def test_names_that_become_the_same_or_too_long_stay_different() -> None:
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
        assert not log_report(report(), mlflow=FakeMlflow(error))
    (record,) = caplog.records
    assert "\n" not in record.getMessage()


def test_environment_is_as_before() -> None:
    before = dict(os.environ)
    log_report(report(), mlflow=FakeMlflow())
    assert dict(os.environ) == before


@pytest.mark.other_env
def test_real_store_holds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path / 'store.db'}"
    monkeypatch.setenv(VARIABLE, uri)
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(None)
    made = Report(
        metrics=(Metric("a b@c", "p@1", "x,y", 0.5, 0.1), Metric("t", "m", "none", math.nan)),
        model={"path": "models/m"},
        config={"tasks": ["a"], "long": "z" * 9000},
    )
    assert log_report(made)
    (run,) = mlflow.MlflowClient(uri).search_runs(["0"])
    assert run.info.run_name == "m"
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"a b_c/p_1": 0.5, "a b_c/p_1_stderr": 0.1}
    names = {item.path for item in mlflow.MlflowClient(uri).list_artifacts(run.info.run_id)}
    assert names == {"report.json", "report.md", "report.html"}
    path = mlflow.MlflowClient(uri).download_artifacts(run.info.run_id, "report.json", str(tmp_path))
    assert from_json(Path(path).read_text(encoding="utf-8")).model == {"path": "models/m"}


@pytest.mark.other_env
def test_server_that_is_gone_costs_seconds_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{taken.getsockname()[1]}")
    mlflow.set_tracking_uri(None)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="olive_ext"):
        assert not log_report(report())
    assert time.monotonic() - begin < 60
    assert "the report is not in MLflow" in caplog.text
