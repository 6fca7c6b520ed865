"""A workflow in a container of Olive's Docker system. This machine's process runs no engine and sees a log: what the
container's workflow found comes back in a file, through a folder that is mounted for it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from olive_ext.errors import RequirementError, RunError
from olive_ext.report import from_json
from olive_ext.workflow.current_run import OUTCOME, Run
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.olive_run import deciding, note_ended, print_results
from olive_ext.workflow.preflight import our_evaluators, our_passes


def run_in_container(system: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> None:
    """The hook of `DockerSystem.run_workflow`: what the container has found counts here, and is printed. Where it hands
    nothing over, its olive_ext is another release, or none is there: the workflow is then not decided.

    Raises `RequirementError` for a container that failed and has found a loss, `RunError` for any other that failed.
    """
    recipe = arguments["run_config"]
    asked = SimpleNamespace(evaluator_config=recipe.engine.evaluator, input_passes_configs=recipe.passes)
    if not any(our_evaluators(asked)) and not any(our_passes(asked)):
        original()
        return
    run_container, environment = system._run_container, system._prepare_environment
    place, stopped = system.work_dir / "olive_ext", None
    with tempfile.TemporaryDirectory(prefix="olive-ext-") as folder:

        def run_mounted(command: str, volumes: list[str], device: Any = None) -> None:
            run_container(command, [*volumes, f"{folder}:{place}"], device=device)

        system._run_container = run_mounted
        system._prepare_environment = lambda given: {**environment(given), OUTCOME: str(place / "outcome.json")}
        try:
            with surfaced("the workflow in the container stopped"):
                original()
        except RunError as error:
            stopped = error
        ended = Run(recipe.input_model, Path(recipe.engine.output_dir or "."))
        file = Path(folder, "outcome.json")
        if file.is_file():
            known = json.loads(file.read_text(encoding="utf-8"))
            ended.reports = [from_json(text) for text in known.pop("reports")]
            vars(ended).update(known)
        elif stopped is None:
            ended.unmeasured, ended.is_undecided = "by this release of olive_ext, which the container has not", True
    print_results(ended)
    note_ended(ended)
    if stopped is not None:
        is_lost = not ended.is_search and any(verdict.status == "loss" for verdict in deciding(ended))
        raise RequirementError(str(stopped), ended.reports[-1]) if is_lost else stopped
