"""lm-eval over some documents: their prompts are those of the whole task, and its aggregation is of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.backends.lm_eval_run import run_tasks
from olive_ext.backends.task_loading import LoadedTasks, load_tasks
from olive_ext.config import EvaluationConfig
from tests.backends.local_tasks import CHOICE, NAMES, write_tasks
from tests.backends.reference import model
from tests.run.duo import NetSession

RANDOM_SHOTS = CHOICE.replace("tiny_choice", "tiny_shots") + "fewshot_split: test\nnum_fewshot: 2\n"
TASKS = [*NAMES, "tiny_shots"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> LoadedTasks:
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    Path(folder, "tiny_shots.yaml").write_text(RANDOM_SHOTS)
    return load_tasks(["tiny_generate", "tiny_shots", "tiny_group"], str(folder))


def run(lm: Any, tasks: LoadedTasks) -> Any:
    config = EvaluationConfig.parse({"model": {"path": "m"}, "tasks": TASKS, "bootstrap_iters": 0})
    return run_tasks(lm, tasks, config)


@pytest.fixture(scope="module")
def whole(tasks: LoadedTasks) -> Any:
    return run(OrtLM(session=NetSession(model())), tasks)


def lines(results: Any, task: str) -> dict[tuple[int, str], Any]:
    return {(line["doc_id"], line["filter"]): line for line in results["samples"].get(task, ())}
