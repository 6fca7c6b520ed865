"""Azure's own SDK reads and validates every example, offline, and refuses what it can.

It lives in an environment of its own, which AZURE_ML_PYTHON names: its pins clash with ours.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.other_env
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from azure.ai.ml import load_job
found = {}
for folder in sys.argv[1:]:
    try:
        job = load_job(folder + "/job.yml")
        result = job._validate() if hasattr(job, "_validate") else None
        found[folder] = [job.type, [] if result is None else sorted(result.error_messages)]
    except Exception as error:
        found[folder] = ["", [f"{type(error).__name__}: {error}"]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "recipes" / "azureml" / "make.py"))["make"](folder, "cpus", "gpus")
    return folder


def judged(*folders: Path) -> list[Any]:
    """Type and errors of each job, as the SDK finds them."""
    python = os.environ.get("AZURE_ML_PYTHON")
    if python is None:
        pytest.skip("AZURE_ML_PYTHON names no Python with azure-ai-ml")
    command = [python, "-W", "ignore", "-c", SCRIPT, *map(str, folders)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return list(json.loads(done.stdout.splitlines()[-1]).values())


def test_every_example_is_valid(jobs: Path) -> None:
    folders = sorted(jobs.iterdir())
    types = {"pipeline": "pipeline", "sweep": "sweep"}
    assert judged(*folders) == [[types.get(folder.name, "command"), []] for folder in folders]


def test_planted_faults_are_refused(jobs: Path, tmp_path: Path) -> None:
    faults = {"compute:": "compute_target:", "type: uri_folder": "type: uri_foder", "code: code": "code: gone"}
    folders = [Path(shutil.copytree(jobs / "command", tmp_path / str(number))) for number in range(len(faults))]
    for folder, (old, new) in zip(folders, faults.items(), strict=True):
        text = (folder / "job.yml").read_text(encoding="utf-8")
        assert old in text
        (folder / "job.yml").write_text(text.replace(old, new, 1), encoding="utf-8")
    for (_, errors), new in zip(judged(*folders), faults.values(), strict=True):
        assert errors, new
