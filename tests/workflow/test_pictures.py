"""The pass as a gate of a model that sees: bounds on a picture task that hold, and one that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from olive.model import ONNXModelHandler
from olive.passes.olive_pass import create_pass_from_dict

from olive_ext.errors import RequirementError
from olive_ext.workflow import OrtLMEvaluation
from tests.refusals import refused

RECIPE = Path(__file__).parents[2] / "recipes" / "vision"

pytestmark = pytest.mark.slow


def gate(folder: Path, *bounds: dict[str, Any]) -> dict[tuple[str, str], float]:
    """The report's metrics of six documents that a model answers which has learned them, behind the bounds."""
    settings = {
        "tasks": ["shapes_colour"],
        "include_path": str(RECIPE / "tasks"),
        "limit": 6,
        "bootstrap_iters": 0,
        "reference": {"path": str(RECIPE / "model"), "mode": "resident"},
        "engine": {"num_threads": 1},
        "require": list(bounds),
    }
    model = ONNXModelHandler(str(RECIPE / "model" / "decoder"), "model.onnx")
    try:
        create_pass_from_dict(OrtLMEvaluation, settings, disable_search=True).run(model, str(folder))
    finally:
        found = json.loads((folder / "report.json").read_text(encoding="utf-8"))["metrics"]
        metrics = {(one["task"], one["metric"]): one["value"] for one in found}
    return metrics


def test_gate_on_a_picture_task_lets_pass_what_keeps_its_bounds_and_nothing_else(tmp_path: Path) -> None:
    kept = [{"metric": "acc", "task": "shapes_colour", "min": 0.2}, {"metric": "kl_mean", "max": 1e-6}]
    metrics = gate(tmp_path / "kept", *kept)
    assert metrics["shapes_colour", "acc"] > 0.2  # chance is 0.17
    with refused(RequirementError, "bound_broken", holds=("shapes_colour/acc", "1.01")):
        gate(tmp_path / "broken", {"metric": "acc", "task": "shapes_colour", "min": 1.01}, kept[1])
