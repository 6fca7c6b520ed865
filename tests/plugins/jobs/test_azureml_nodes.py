"""A job on two nodes, as two processes with Azure's rank variables: the numbers are those of one node, and a job that
lost a node goes on from its output folder.

Needs the extra `[ray]`. The very command lines run, as `recipes/azureml/run_local.py` gives them their surroundings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from olive_ext.plugins.jobs.azureml import make_azureml_job
from tests.exports import genai_export
from tests.test_killed import CHOICE, LOADER

pytestmark = pytest.mark.other_env
ray = pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[3]
NUM_DOCUMENTS = 1500


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The jobs of one recipe: `1` on one node, `2` on two."""
    folder = tmp_path_factory.mktemp("nodes")
    tasks = folder / "tasks"
    tasks.mkdir()
    loader = LOADER.replace("range(80)", f"range({NUM_DOCUMENTS})").replace("n * 7", "n * 7 % 600")
    (tasks / "local.py").write_text(loader, encoding="utf-8")
    (tasks / "choice.yaml").write_text(CHOICE, encoding="utf-8")
    evaluator = {
        "type": "OrtLMEvaluator",
        "user_script": str(ROOT / "recipes" / "quickstart" / "olive_ext_plugin.py"),
        "tasks": ["kill_choice"],
        "include_path": str(tasks),
        "engine": {"num_threads": 1, "num_slots": 4},
    }
    recipe = {
        "input_model": {"type": "ONNXModel", "model_path": str(genai_export("llama"))},
        "evaluators": {"e": evaluator},
        "evaluator": "e",
        "evaluate_input_model": True,
        "passes": {},
    }
    (folder / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    for nodes in (1, 2):
        make_azureml_job(folder / "recipe.json", "cpus", folder / str(nodes), nodes)
    return folder


def begin(job: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "recipes" / "azureml" / "run_local.py"), str(job), "--output", str(output)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, env={**os.environ, "PATH": path, "PYTHONPATH": python_path})


def report(output: Path) -> Any:
    (found,) = output.rglob("report.json")
    return json.loads(found.read_text(encoding="utf-8"))


def nodes(runner: subprocess.Popen[bytes], rank: int) -> Iterator[psutil.Process]:
    """The processes of a node, itself first."""
    for node in psutil.Process(runner.pid).children():
        if node.environ().get("NODE_RANK") == str(rank):
            yield from [node, *node.children(recursive=True)]


@pytest.fixture(scope="module")
def expected(jobs: Path) -> Any:
    output = jobs / "out of one"
    assert begin(jobs / "1", output).wait(600) == 0
    return report(output)["metrics"]


def test_two_nodes_give_the_numbers_of_one(jobs: Path, expected: Any) -> None:
    output = jobs / "out of two"
    assert begin(jobs / "2", output).wait(900) == 0
    found = report(output)
    assert found["metrics"] == expected
    assert found["model"]["workers"]["names"] == ["worker 0", "worker 1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_goes_on_where_one_of_its_nodes_was_killed(rank: int, jobs: Path, expected: Any) -> None:
    output = jobs / f"out without {rank}"
    runner = begin(jobs / "2", output)
    while not any(path.read_text().count("\n") > 2 for path in output.rglob("answers*.jsonl")):
        assert runner.poll() is None
        time.sleep(0.05)
    for process in list(nodes(runner, rank)):
        process.kill()
    assert runner.wait(120) != 0
    assert not list(output.rglob("report.json"))
    assert begin(jobs / "2", output).wait(900) == 0
    found = report(output)
    assert found["metrics"] == expected
    assert found["model"]["journal"]["answers_known"] > 0
