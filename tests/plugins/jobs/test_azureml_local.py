"""A job that was killed goes on from its output folder.

Its very command line runs, as `recipes/azureml/run_local.py` gives it its surroundings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from olive_ext.plugins.jobs.azureml import make_azureml_job
from tests.exports import genai_export
from tests.test_killed import CHOICE, LOADER

ROOT = Path(__file__).resolve().parents[3]
NUM_DOCUMENTS = 600


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
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
    make_azureml_job(folder / "recipe.json", "cpus", folder / "job")
    return folder / "job"


def begin(job: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "recipes" / "azureml" / "run_local.py"), str(job), "--output", str(output)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, env={**os.environ, "PATH": path, "PYTHONPATH": python_path})


def report(output: Path) -> Any:
    (found,) = output.rglob("report.json")
    return json.loads(found.read_text(encoding="utf-8"))


@pytest.mark.long
def test_a_job_that_was_killed_goes_on_from_its_output(job: Path, tmp_path: Path) -> None:
    assert begin(job, tmp_path / "whole").wait(600) == 0
    output = tmp_path / "killed"
    runner = begin(job, output)
    while not any(path.read_text().count("\n") > 2 for path in output.rglob("answers*.jsonl")):
        assert runner.poll() is None
        time.sleep(0.05)
    for process in [psutil.Process(runner.pid), *psutil.Process(runner.pid).children(recursive=True)]:
        process.kill()
    assert runner.wait(120) != 0
    assert not list(output.rglob("report.json"))
    assert begin(job, output).wait(600) == 0
    found = report(output)
    assert found["metrics"] == report(tmp_path / "whole")["metrics"]
    assert found["model"]["journal"]["answers_known"] > 0
