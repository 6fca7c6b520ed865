"""Olive's workflows on a real MLflow server: a run for the workflow, a child for each evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from olive_ext.workflow import cli_run
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export
from tests.plugins.mlflow.mlflow_server import Server, children, client, serving
from tests.workflow.recipes import recipe, saved, search_blocks

pytestmark = [pytest.mark.slow, pytest.mark.other_env]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("mlflow")) as made:
        yield made


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
    path = saved(folder, {**recipe(folder, onnx(folder), passes=passes), "output_dir": str(folder / "chain")})
    for number in (1, 2):  # the second time from Olive's cache
        assert cli_run(["--config", path]) == 0
        parent = parents("chain")[-1]
        assert len(parents("chain")) == number
        found = sizes(parent)
        assert found[1] < found[0]
        assert {item.path for item in client().list_artifacts(parent)} >= {"chain.md", "chain.json"}
        names = [{item.path for item in client().list_artifacts(run.info.run_id)} for run in children(parent)]
        assert names == [{"report.json", "report.md", "report.html"}] * 2
