"""The toy repository: its pull requests pass, fail and cannot be told by the steps of its own workflows, and its float
model runs once for its content."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "gate"
STATUSES = {"passes": 0, "fails": 1, "cannot-tell": 3}


def parsed(file: Path) -> dict[Any, Any]:
    """A YAML file."""
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@dataclass
class Machine:
    """A runner: a home that is new for each job, caches that outlive it, artifacts; it goes on behind a step that
    failed as the step's `if` says. What it does not know raises `KeyError`."""

    repository: Path
    place: Path
    caches: dict[str, Path] = field(default_factory=dict)
    status: int = 0
    output: str = ""
    outputs: dict[str, str] = field(default_factory=dict)

    def job(self, branch: str) -> Path:
        """Begins a job: a checkout of the branch and an empty home."""
        for name in ("home", "work", "artifacts"):
            shutil.rmtree(self.place / name, ignore_errors=True)
        (self.place / "home").mkdir(parents=True)
        self.status, self.output, self.outputs = 0, "", {}
        (self.place / "summary.md").write_text("")
        subprocess.run(
            ["git", "clone", "--quiet", "--branch", branch, str(self.repository), "work"], cwd=self.place, check=True
        )
        return self.place / "work"

    def shell(self, script: str, environment: Mapping[str, str]) -> None:
        """One step in bash, which ends with the first failure. Nothing is installed: what would be must exist."""
        if "pip install" in script:
            what = subprocess.run(
                ["bash", "-c", re.sub("python -m pip install", "printf %s", script)],
                env={**os.environ, **environment}, capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            assert (
                what.startswith("olive-ext[cpu] @ git+https://")
                or Path(what.removesuffix("[cpu]"), "setup.cfg").is_file()
            )
            return
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {key: text for key, text in os.environ.items() if key != "XDG_CACHE_HOME"}
        given |= {"PATH": programs, "PYTHONPATH": str(ROOT), "HOME": str(self.place / "home"), **environment}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=self.place / "work", env=given, capture_output=True, text=True, check=False)
        self.output += done.stdout
        assert done.returncode in (0, 1, 3), done.stderr
        self.status = self.status or done.returncode

    def restore(self, path: str, key: str, prefix: str) -> None:
        """A cache by its key, else the latest whose key begins so."""
        chosen = [name for name in self.caches if name == key] or [
            name for name in self.caches if name.startswith(prefix)
        ]
        if chosen:
            shutil.copytree(self.caches[chosen[-1]], self.at(path))

    def save(self, path: str, key: str) -> None:
        """Keeps a cache; one of the same key stays as it is."""
        if key not in self.caches and self.at(path).is_dir():
            self.caches[key] = Path(shutil.copytree(self.at(path), self.place / "caches" / str(len(self.caches))))

    def at(self, path: str) -> Path:
        """The place of a cache."""
        return self.place / "home" / path.removeprefix("~/").removeprefix("$(HOME)/")

    # GitHub

    def steps(self, steps: list[dict[str, Any]], inputs: Mapping[str, str]) -> None:
        """The steps of a workflow or of an action with its inputs."""
        for step in steps:
            condition = step.get("if", "success()")
            if self.holds(condition, inputs):
                self.step(self.filled(step, inputs), inputs)

    def holds(self, condition: str, inputs: Mapping[str, str]) -> bool:
        """Whether a step runs."""
        parts = condition.split(" && ")
        functions = {"always()": True, "!cancelled()": True, "success()": self.status == 0}
        if not set(parts) & {"always()", "!cancelled()"} and self.status:
            return False
        return all(functions[part] if part in functions else self.differs(part, inputs) for part in parts)

    def differs(self, part: str, inputs: Mapping[str, str]) -> bool:
        """`name != 'text'`."""
        name, text = part.split(" != ")
        return self.value(name, inputs) != text.strip("'")

    def value(self, name: str, inputs: Mapping[str, str]) -> str:
        """What stands for an expression."""
        if name.startswith("inputs."):
            return inputs[name.removeprefix("inputs.")]
        return self.outputs.get("key", "") if name == "steps.cache.outputs.key" else {"runner.os": "Linux"}[name]

    def filled(self, step: dict[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
        """The step with its expressions replaced."""
        text = re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda found: self.value(found[1], inputs), json.dumps(step))
        return json.loads(text)

    def step(self, step: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
        """One step."""
        given = step.get("with", {})
        if "run" in step:
            told = self.place / "outputs.txt"
            told.write_text("")
            machine = {"GITHUB_STEP_SUMMARY": str(self.place / "summary.md"), "GITHUB_ACTIONS": "true"}
            machine |= {"GITHUB_OUTPUT": str(told), "GITHUB_ACTION_PATH": str(ROOT)}
            self.shell(step["run"], {**machine, **step.get("env", {})})
            self.outputs |= dict(line.split("=", 1) for line in told.read_text().splitlines())
            return
        name = step["uses"].partition("@")[0]
        if name == "OWNER/olive-ext":
            action = parsed(ROOT / "action.yml")
            assert set(given) <= set(action["inputs"])
            own = {name: item.get("default", "") for name, item in action["inputs"].items()} | given
            self.steps(action["runs"]["steps"], own)
        elif name == "actions/cache/restore":
            self.restore(given["path"], given["key"], given["restore-keys"])
        elif name == "actions/cache/save":
            self.save(given["path"], given["key"])
        elif name == "actions/upload-artifact":
            source, to = self.place / "work" / given["path"], self.place / "artifacts" / given["name"]
            (shutil.copytree if source.is_dir() else _copied)(source, to)
        else:
            assert name in ("actions/checkout", "actions/setup-python")

    # Azure Pipelines

    def azure(self, pipeline: Mapping[str, Any]) -> None:
        """The steps of a pipeline; the cache is left out, as of a job that fails nothing is saved there."""
        for step in pipeline["steps"]:
            if self.status and step.get("condition") != "always()":
                continue
            if "script" in step:
                self.shell(step["script"], {"TF_BUILD": "True"})
            elif step.get("task") == "PublishTestResults@2":
                ElementTree.parse(self.place / "work" / step["inputs"]["testResultsFiles"])
            elif "publish" in step:
                assert (self.place / "work" / step["publish"]).is_dir()
            else:
                assert {"checkout", "task"} & set(step)


def _copied(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, to)


def tokens_fed(work: Path) -> int:
    """How many tokens the float model was asked."""
    report = json.loads((work / "out" / "report" / "report.json").read_text(encoding="utf-8"))
    return int(report["comparison"]["reference"]["tokens_fed"])


def bounds(junit: Path) -> dict[str, str]:
    """What each case says: passed, loss or cannot tell."""
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    return {
        str(case.get("name")): next((str(item.get("type")) for item in case if item.get("type")), "") for case in cases
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pull_requests_pass_fail_and_cannot_be_told(tmp_path: Path) -> None:
    """Main fills the cache; three pull requests end with 0, 3 and 1, as the recipe shows them, and only the one that
    changes the checkpoint has a float model run; Azure's steps end as GitHub's."""
    repository = tmp_path / "toy"
    subprocess.run([sys.executable, str(RECIPE / "make.py"), str(repository)], check=True)
    workflow = parsed(repository / ".github" / "workflows" / "quality.yml")
    machine = Machine(repository, tmp_path)
    fed, saved = {}, {}
    for branch, status in {"main": 0, "passes": 0, "cannot-tell": 3, "fails": 1}.items():
        work = machine.job(branch)
        machine.steps(workflow["jobs"]["gate"]["steps"], {})
        assert machine.status == status, machine.output
        fed[branch], saved[branch] = tokens_fed(work), len(machine.caches)
        assert (tmp_path / "artifacts" / "report" / "report.html").is_file()
        if branch == "main":
            continue
        shown = RECIPE / "runs" / branch
        junit = tmp_path / "artifacts" / "olive-ext-gate"
        assert bounds(junit) == bounds(shown / "gate.xml")
        summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
        assert summary.split()[:3] == (shown / "summary.txt").read_text(encoding="utf-8").split()[:3]
        assert ("::error" in machine.output, "::warning" in machine.output) == (status == 1, status == 3)
        machine.status, machine.output = 0, ""
        machine.azure(parsed(work / "azure-pipelines.yml"))
        assert machine.status == status, machine.output
        assert ("##vso[task.logissue" in machine.output) == (status != 0)
    assert fed["main"] > 0
    assert (fed["passes"], fed["cannot-tell"], fed["fails"] > 0) == (0, 0, True)
    assert saved == {"main": 1, "passes": 1, "cannot-tell": 1, "fails": 2}


def test_page_shows_the_workflow_and_runs_as_they_are() -> None:
    """The documented workflow, summary and cases are the recipe's files, word for word."""
    page = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    shown = [
        RECIPE / "repository" / ".github/workflows/quality.yml",
        RECIPE / "runs" / "cannot-tell" / "summary.txt",
    ]
    assert [file.name for file in shown if f"\n{file.read_text(encoding='utf-8').strip()}\n```" not in page] == []
    for branch in STATUSES:
        line = (RECIPE / "runs" / branch / "log.txt").read_text(encoding="utf-8").splitlines()[0]
        assert line in page, branch
