"""Metrics that tasks declare, read without data."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import evaluator_utils
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask

from olive_ext.backends.evaluated_task import prepare
from olive_ext.backends.task_checks import named_aggregations
from olive_ext.backends.task_loading import declared_metrics, load_tasks, loaded_metrics
from olive_ext.errors import TaskError
from olive_ext.report.metrics import read_metrics
from tests.backends.local_tasks import write_tasks
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_tasks(tmp_path / "tasks"))


def test_loaded_tasks_and_groups_say_the_same_as_their_files(folder: str) -> None:
    found = loaded_metrics(load_tasks(["tiny_group", "tiny_generate"], folder))
    leaves = ["tiny_choice", "tiny_rolling", "tiny_generate"]
    assert {task: found[task] for task in leaves} == declared_metrics(leaves, folder)
    assert found["tiny_group"] == {"acc", "acc,none"}
    assert len(found) == 4


def test_shipped_task_is_read_without_the_whole_index() -> None:
    begin = time.process_time()
    assert declared_metrics(["arc_easy"]) == {"arc_easy": {"acc", "acc,none", "acc_norm", "acc_norm,none"}}
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("spec", ["tiny_group", "no_such_task", {"group": "g", "task": ["tiny_choice"]}])
def test_groups_and_unknown_names_tell_nothing_and_a_missing_folder_is_refused(folder: str, spec: str) -> None:
    assert declared_metrics(["tiny_choice", spec], folder) is None
    with refused(TaskError, "not_found", "include_path", "nowhere"):
        declared_metrics(["a"], "nowhere")


@pytest.mark.parametrize("kind", [torch.tensor, Decimal, Fraction, np.array, np.float16])
def test_what_is_as_good_as_a_number_is_the_number(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `process_results` or an aggregation has it; what no mean is made of stays as it is."""

    class Own(ConfigurableTask):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def aggregation(self) -> dict[str, Any]:
            return {"near": mean, "both": sum}

        def process_results(self, doc: Any, results: Any) -> dict[str, Any]:
            return {"near": kind(0.5), "both": kind(0.25)}

    task = Own()
    prepare({"t": task}, None, thinks=False)
    values = task.process_results({}, [])
    assert (float(values["near"]), type(values["both"])) == (0.5, type(kind(0.25)))
    assert isinstance(values["near"], float | np.floating | Fraction)
    several = torch.tensor([0.5, 1.0])
    found = {"near,none": kind(0.5), "several,none": several}
    monkeypatch.setattr(evaluator_utils, "_compute_task_aggregations", lambda task: (found, 1))
    with named_aggregations():
        numbers, _ = evaluator_utils._compute_task_aggregations(SimpleNamespace(task_name="t"))
    metrics = read_metrics({"results": {"t": numbers}})
    assert [(item.metric, item.value) for item in metrics] == [("near", 0.5)]
    assert numbers["several,none"] is several
