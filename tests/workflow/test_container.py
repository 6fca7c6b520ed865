"""What a workflow in a container finds, on a system that runs nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from olive.evaluator.olive_evaluator import OliveEvaluatorConfig

from olive_ext.config import EVALUATOR_TYPE
from olive_ext.errors import RequirementError, RunError
from olive_ext.report.comparison import Comparison
from olive_ext.report.verdict import Reason, worst_status
from olive_ext.workflow.current_run import OUTCOME, Run
from olive_ext.workflow.olive_run import deciding, run_in_container, watched_runs
from tests.refusals import refused
from tests.workflow.recipes import REPORT

OURS = OliveEvaluatorConfig(type=EVALUATOR_TYPE, name="e", tasks=["arc_easy"])


class Docker:
    """Olive's Docker system, whose container leaves what its workflow has `found`: every mount is a link."""

    def __init__(self, work_dir: Path, found: Run | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work_dir, self.found, self.monkeypatch = work_dir, found, monkeypatch
        self.volumes: list[str] = []
        self.fails = False

    def _prepare_environment(self, given: dict[str, str]) -> dict[str, str]:
        return given

    def _run_container(self, command: str, volumes: list[str], device: Any = None) -> None:
        self.volumes = volumes
        for volume in volumes[1:]:
            here, there = volume.rsplit(":", 1)
            Path(there).symlink_to(here)
        for name, value in self._prepare_environment({"OWN": "1"}).items():
            self.monkeypatch.setenv(name, value)
        if self.found is not None:
            self.found.hand_over()

    def run_workflow(self) -> None:
        self._run_container("python workflow_runner.py", ["model:/model"])
        if self.fails:
            raise OSError("the container ended with status 1")


def outcome(system: Docker, evaluator: Any) -> list[Run]:
    recipe = SimpleNamespace(
        engine=SimpleNamespace(evaluator=evaluator, output_dir="out"), passes={}, input_model="the input model"
    )
    with watched_runs() as runs:
        run_in_container(system, {"run_config": recipe}, system.run_workflow)
    return runs


@pytest.mark.parametrize("asks", [True, False])
def test_verdicts_of_a_container_are_the_workflows(
    asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with 0, whatever the container had found."""
    unknown = replace(REPORT, comparison=Comparison({}, over_all=asks))
    found = Run("there", reports=[REPORT, unknown], num_earlier=1, gave_up=True)
    system = Docker(tmp_path, found, monkeypatch)
    (run,) = outcome(system, OURS)
    assert worst_status(deciding(run)) == (3 if asks else 0)
    assert [one.comparison is None for one in run.reports] == [True, False]
    assert (run.num_earlier, run.gave_up, run.is_undecided, run.is_search) == (1, True, False, False)
    assert system.volumes[0] == "model:/model"
    assert "nothing was compared" in capsys.readouterr().out


def test_workflow_is_not_decided_where_the_container_hands_nothing_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = outcome(Docker(tmp_path, None, monkeypatch), OURS)
    assert (run.is_undecided, run.gave_up, run.reports) == (True, False, [])
    assert capsys.readouterr().out.startswith("the output model was not evaluated by this release")


@pytest.mark.parametrize(("is_lost", "is_search"), [(True, False), (True, True), (False, False)])
def test_container_that_failed_by_a_loss_breaks_a_bound(
    is_lost: bool, is_search: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = replace(REPORT, comparison=Comparison({}), broken=(Reason("bound_broken", words="acc"),) * is_lost)
    system = Docker(tmp_path, Run("there", reports=[lost], is_search=is_search), monkeypatch)
    system.fails = True
    kind, code = (RequirementError, "bound_broken") if is_lost and not is_search else (RunError, "failed")
    with refused(kind, code, holds="status 1"):
        outcome(system, OURS)


def test_container_without_our_types_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Docker(tmp_path, None, monkeypatch)
    assert outcome(system, OliveEvaluatorConfig(type="LMEvaluator", tasks=["t"])) == []
    assert system.volumes == ["model:/model"]
    assert OUTCOME not in system._prepare_environment({})
