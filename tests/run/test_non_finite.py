"""A model with NaN in a part of its vocabulary: the run stops by name, or it counts requests and no gate holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from olive_ext.config import Bound, EvaluationConfig
from olive_ext.errors import NonFiniteError
from olive_ext.report import Report
from olive_ext.report.verdict import verdict
from olive_ext.run import evaluate
from olive_ext.run.bounds import broken_bounds
from olive_ext.workflow.evaluator import broken_in, to_metric_result
from tests.backends.local_tasks import write_tasks
from tests.check.tiny import put_model
from tests.refusals import refused
from tests.session.tiny import byte_level


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def broken(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NaN in the embedding of the last token of " on": what comes behind it has no distribution."""
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("broken") / "model"))
    graph = onnx.load(folder / "model.onnx")
    tensor = next(found for found in graph.graph.initializer if found.name == "embedding")
    values = numpy_helper.to_array(tensor).copy()
    token = byte_level().encode(" on", add_special_tokens=False)[-1]
    values[token] = np.nan
    tensor.CopyFrom(numpy_helper.from_array(values, "embedding"))
    onnx.save(graph, folder / "model.onnx")
    return folder


def run(path: Path, tmp_path: Path, **values: object) -> Report:
    tasks = {"tasks": ["tiny_choice", "tiny_generate"], "include_path": str(write_tasks(tmp_path / "tasks"))}
    given = {"model": {"path": str(path)}, "max_length": 64, "bootstrap_iters": 0, **tasks, **values}
    return evaluate(EvaluationConfig.parse(given))


@pytest.mark.parametrize("is_kept", [True, False])
def test_run_stops_by_name(is_kept: bool, broken: Path, tmp_path: Path) -> None:
    kept = {"output_dir": str(tmp_path / "out")} if is_kept else {}
    with refused(NonFiniteError, "not_finite", holds=("non_finite", "tiny_choice", "document")):
        run(broken, tmp_path, **kept)


def test_reported_requests_are_counted_and_no_bound_holds(broken: Path, whole: Path, tmp_path: Path) -> None:
    report = run(broken, tmp_path, non_finite="report")
    (counted,) = (metric for metric in report.metrics if metric.task == "non_finite")
    assert counted.value == report.engine["non_finite"] > 0
    bounds = [Bound(metric="tiny_choice/acc", min=0.0), Bound(metric="tiny_choice/acc_norm", min=0.0)]
    for reasons in broken_bounds(bounds, report.metrics), broken_in(to_metric_result(report), bounds):
        assert [reason.words.split()[0] for reason in reasons] == [str(int(counted.value))]
    sound = run(whole, tmp_path)
    assert sound.engine["non_finite"] == 0
    assert broken_bounds(bounds, sound.metrics) == []


@pytest.mark.parametrize("mode", ["resident", "recorded"])
def test_comparison_of_reported_requests_cannot_tell(broken: Path, whole: Path, tmp_path: Path, mode: str) -> None:
    for path, other in ((broken, whole), (whole, broken)):
        reference = {"path": str(other), "mode": mode, "records_dir": str(tmp_path / "records")}
        report = run(path, tmp_path, non_finite="report", reference=reference)
        assert report.comparison is not None
        found = verdict(report.comparison)
        assert (found.code, "requests" in found.finding) == ("cannot_tell", True)
        assert broken_bounds([Bound(metric="tiny_choice/acc", min=0.0)], report.metrics)
