"""A recipe with an evaluator and a pass of ours, for one mistake each."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.exports.quickstart import MODEL

RECIPE: dict[str, Any] = {
    "input_model": {"type": "HfModel", "model_path": str(MODEL)},
    "evaluators": {"ours": {"type": "OrtLMEvaluator", "tasks": ["arc_easy"], "batch_size": "auto"}},
    "passes": {"measure": {"type": "ortlmevaluation", "config": {"tasks": [{"task": "mine"}]}}},
    "evaluator": "ours",
}
OURS, MEASURE, QUANTIZE = "evaluators.ours", "passes.measure", "passes.q"


def put(tmp_path: Path, recipe: Mapping[str, Any]) -> Path:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The recipe with `value` at a dotted path, a copy of its own: Olive puts objects into a list of metrics."""
    recipe = copy.deepcopy(RECIPE)
    *parents, last = path.split(".")
    block: Any = recipe
    for part in parents:
        block = block.setdefault(part, {})
    block[last] = copy.deepcopy(value)
    return recipe
