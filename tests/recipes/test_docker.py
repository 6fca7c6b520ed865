"""The recipe for Olive's Docker system, run by it over a stand-in for Docker: the container's command, in a process of
this machine, in a folder that has the container's mounts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from olive_ext.report import from_json
from olive_ext.workflow import cli_run
from olive_ext.workflow.olive_run import watched_runs

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "docker" / "recipe.json"


class Container:
    """What Olive asks of one: its log and its status."""

    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        self._done = done

    def logs(self, **_: object) -> list[bytes]:
        return self._done.stdout.splitlines()

    def wait(self) -> dict[str, int]:
        return {"StatusCode": self._done.returncode}

    def remove(self) -> None:
        """Nothing is left of it."""


class Docker:
    """A client whose containers are processes: every mount is a link at its place in the container."""

    def __init__(self) -> None:
        self.images = self.containers = self
        self.mounts: dict[str, str] = {}

    def get(self, name: str) -> Any:
        return types.SimpleNamespace(tags=[name], id=name)

    def run(self, image: Any, command: str, volumes: list[str], environment: dict[str, str], **_: object) -> Container:
        for volume in volumes:
            here, there = volume.rsplit(":", 1)
            self.mounts[there] = here
            Path(there).symlink_to(here)
        words = [sys.executable, *shlex.split(command)[1:]]
        own = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        folder = Path(shlex.split(command)[-1]).parent
        return Container(subprocess.run(words, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))


def stand_in(client: Docker) -> types.ModuleType:
    """The package `docker`, as far as Olive imports it."""
    module = types.ModuleType("docker")
    errors = types.ModuleType("docker.errors")
    for name in ("BuildError", "ContainerError", "ImageNotFound"):
        setattr(errors, name, type(name, (Exception,), {}))
    module.errors, module.from_env = errors, lambda: client
    return module


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """The recipe over the quickstart's model and tasks in `tmp_path`, with the container's folder there, too."""
    for part in ("model", "tasks", "olive_ext_plugin.py"):
        source, place = ROOT / "recipes" / "quickstart" / part, tmp_path / "recipes" / "quickstart" / part
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    made: dict[str, Any] = json.loads(RECIPE.read_text(encoding="utf-8"))
    for folder in re.findall(r"out/docker/\w+", (RECIPE.parent / "README.md").read_text(encoding="utf-8")):
        (tmp_path / folder).mkdir(parents=True)
    made["systems"]["container"]["work_dir"] = str(tmp_path / "container")
    (tmp_path / "container").mkdir()
    return made


@pytest.mark.long
def test_workflow_runs_in_a_container(
    tmp_path: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Docker()
    module = stand_in(client)
    monkeypatch.setitem(sys.modules, "docker", module)
    monkeypatch.setitem(sys.modules, "docker.errors", module.errors)
    monkeypatch.chdir(tmp_path)
    recipe["evaluators"]["quickstart"]["fail_on_loss"] = 60
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    with watched_runs() as runs:
        assert cli_run(["--config", "recipe.json"]) == 0
    (of_container,) = runs
    assert [report.comparison is None for report in of_container.reports] == [True, False]
    assert "no loss found" in capsys.readouterr().out
    assert {Path(place).name for place in client.mounts} >= {"model", "tasks", "olive_ext_plugin.py", "report"}
    found = json.loads(next((tmp_path / "out" / "docker").rglob("*metrics.json")).read_text())
    assert "quickstart_choice-acc" in found
    (carried,) = (tmp_path / "out" / "docker" / "output").rglob("report.json")
    assert from_json(carried.read_text()).model["passes"] == ["int4"]


def test_image_is_built_from_files_that_are_there() -> None:
    system = json.loads(RECIPE.read_text(encoding="utf-8"))["systems"]["container"]
    text = (ROOT / system["build_context_path"] / system["dockerfile"]).read_text(encoding="utf-8")
    assert re.findall(r"-c /src/(\S+)", text) == ["constraints.txt"]
    assert (ROOT / "constraints.txt").is_file()
    assert "'/src[cpu]'" in text
