"""Evaluations on a real MLflow server, which is killed and looked at in a browser. Olive's workflows there: a run for
the workflow, a child for each evaluation."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from olive_ext.plugins.mlflow.mlflow_log import logged_run
from olive_ext.report import Metric, Report, from_json
from olive_ext.workflow import cli_run
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export
from tests.plugins.mlflow.mlflow_server import Server, children, client, serving
from tests.report.chromium import Chromium, find_chromium
from tests.report.synthetic import comparison, report
from tests.workflow.recipes import recipe, saved, search_blocks

pytestmark = pytest.mark.other_env


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("mlflow")) as made:
        yield made


def chain(name: str, *reports: Report) -> str:
    """A workflow with an evaluation for each report; the parent's id."""
    with logged_run(name, is_parent=True) as parent:
        for made in reports:
            with logged_run("m") as run:
                run.log(made)
    assert parent.run_id is not None
    return parent.run_id


def test_run_holds_everything_and_its_page_shows_it(tmp_path: Path, server: Server) -> None:
    made = report(found=comparison(20))
    odd = Report(metrics=(Metric("a b@c", "p@1", "x,y", 0.5, 0.1),), model={"path": "m"}, config={"long": "z" * 9000})
    parent = chain("chain", made, odd)
    found = client().get_run(parent)
    assert found.info.status == "FINISHED"
    assert [(one.step, one.value) for one in client().get_metric_history(parent, "a b_c/p_1")] == [(1, 0.5)]
    first, second = children(parent)
    assert first.data.metrics["size_on_disk/bytes"] == 1_111_720
    assert "olive_ext.verdict" in first.data.tags
    assert second.data.metrics == {"a b_c/p_1": 0.5, "a b_c/p_1_stderr": 0.1}
    names = {item.path for item in client().list_artifacts(first.info.run_id)}
    assert names == {"report.json", "report.md", "report.html"}
    path = client().download_artifacts(first.info.run_id, "report.json", str(tmp_path))
    assert from_json(Path(path).read_text(encoding="utf-8")) == made
    browser = find_chromium()
    if browser is not None:
        page = f"{server.uri}/#/experiments/{found.info.experiment_id}/runs/{first.info.run_id}"
        with Chromium(browser) as window:
            window.show(1400, 1000)
            window.call("Page.navigate", url=page)
            for shown in ("int4", "olive_ext.verdict", "quickstart_choice/acc_norm"):
                window.wait(f"document.body && document.body.innerText.includes({shown!r})")
            window.screenshot(Path(os.environ.get("SCREENSHOTS", tmp_path)) / "mlflow.png")


def test_server_that_dies_midway_costs_seconds_and_warnings(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="olive_ext"), logged_run("dies", is_parent=True) as parent:
        with logged_run("m") as run:
            run.log(report())
        server.kill()
        begin = time.monotonic()
        with logged_run("m") as run:
            run.log(report())
        assert time.monotonic() - begin < 60
        server.start()
        with logged_run("m") as run:
            run.log(report())
    assert "MLflow" in caplog.text
    assert client().get_run(parent.run_id).info.status == "FINISHED"
    assert len(children(parent.run_id)) == 2


def test_store_of_azure_ml_loads_beside_the_pinned_client() -> None:
    pytest.importorskip("azureml.mlflow", reason="pip install -c constraints.txt '.[azureml]'")
    (store,) = entry_points(group="mlflow.tracking_store", name="azureml")
    assert callable(store.load())


@pytest.fixture
def folder(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tasks(tmp_path / "tasks")
    shutil.copytree(genai_export("llama"), tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLIVE_DISABLE_TELEMETRY", "1")
    return tmp_path


def onnx(folder: Path) -> dict[str, Any]:
    return {"type": "ONNXModel", "model_path": str(folder / "package"), "onnx_file_name": "model.onnx"}


def parents(name: str) -> list[str]:
    """Ids of the workflows' runs, the oldest first."""
    runs = client().search_runs(["0"], f"attributes.run_name = '{name}'", order_by=["attributes.start_time ASC"])
    return [run.info.run_id for run in runs if "mlflow.parentRunId" not in run.data.tags]


def sizes(run_id: str) -> dict[int, float]:
    """The candidates' sizes in bytes, by step, as the workflow's run has them."""
    return {one.step: one.value for one in client().get_metric_history(run_id, "size_on_disk/bytes")}


def test_search_has_a_run_for_each_candidate(folder: Path) -> None:
    size = {"name": "size_on_disk", "type": "size_on_disk", "sub_types": [{"name": "bytes", "priority": 1}]}
    block = {"type": "OrtLMEvaluator", "tasks": ["tiny_choice", "size_on_disk"], "include_path": "tasks",
             "bootstrap_iters": 0, "metrics": [size], "output_dir": "reports"}  # fmt: skip
    whole = recipe(folder, onnx(folder), **search_blocks(block))
    path = saved(folder, {**whole, "output_dir": str(folder / "search")})
    assert cli_run(["--config", path]) == 0
    (parent,) = parents("search")
    assert client().get_run(parent).info.status == "FINISHED"
    assert [run.info.status for run in children(parent)] == ["FINISHED", "FINISHED"]
    found = sizes(parent)
    assert [run.data.metrics["size_on_disk/bytes"] for run in children(parent)] == [found[0], found[1]]
    assert found[0] != found[1]
    assert all("tiny_choice/acc" in run.data.metrics for run in children(parent))
    assert {item.path for item in client().list_artifacts(parent)} >= {"footprint.json"}

    assert cli_run(["--config", path]) == 0  # everything is in Olive's cache
    first, again = parents("search")
    assert first == parent
    assert sorted(sizes(again).values()) == sorted(found.values())


def test_chain_is_a_run_whose_steps_are_its_measuring_passes(folder: Path) -> None:
    measure = {"type": "OrtLMEvaluation", "tasks": ["tiny_choice"], "include_path": "tasks"}
    passes = {"before": measure, "int4": {"type": "OnnxKQuantQuantization"}, "after": measure}
    path = saved(folder, {**recipe(folder, onnx(folder), passes=passes), "output_dir": str(folder / "measured")})
    for number in (1, 2):  # the second time from Olive's cache
        assert cli_run(["--config", path]) == 0
        parent = parents("measured")[-1]
        assert len(parents("measured")) == number
        found = sizes(parent)
        assert found[1] < found[0]
        assert {item.path for item in client().list_artifacts(parent)} >= {"chain.md", "chain.json"}
        names = [{item.path for item in client().list_artifacts(run.info.run_id)} for run in children(parent)]
        assert names == [{"report.json", "report.md", "report.html"}] * 2
