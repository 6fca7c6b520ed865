"""`OrtLossMap` between passes: the model goes on unchanged, and its map travels with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from olive.workflows import run as olive_run

from olive_ext.check import check_recipe
from olive_ext.check.recipe import mistakes
from olive_ext.config import schema
from olive_ext.workflow import register
from tests.exports import quickstart
from tests.workflow.recipes import recipe, saved

KEYS: dict[str, Any] = {
    "tasks": ["quickstart_choice"],
    "include_path": str(quickstart.TASKS),
    "limit": 8,
    "top": 2,
}


def blocks(**changes: Any) -> dict[str, Any]:
    return {"passes": {"map": {"type": "OrtLossMap", "reference": str(quickstart.exported()), **KEYS, **changes}}}


@pytest.mark.slow
def test_map_lies_beside_the_model_that_is_handed_on(tmp_path: Path) -> None:
    model = {"type": "ONNXModel", "model_path": str(quickstart.quantized(4, 128)), "onnx_file_name": "model.onnx"}
    register()
    olive_run(recipe(tmp_path, model, **blocks()))
    (stored,) = (tmp_path / "out").rglob("loss_map.json")
    loss_map = json.loads(stored.read_text())
    assert len(loss_map["entries"]) == 21
    assert {"loss_map.html", "loss_map.md"} <= {file.name for file in stored.parent.iterdir()}
    (graph,) = (tmp_path / "out").rglob("model.onnx")
    assert graph.read_bytes() == (quickstart.quantized(4, 128) / "model.onnx").read_bytes()


def test_wrong_keys_of_the_pass_are_told_with_their_place(tmp_path: Path) -> None:
    model = {"type": "ONNXModel", "model_path": str(tmp_path)}
    (told,) = map(str, mistakes(recipe(tmp_path, model, **blocks(tops=3, by="nodes")), has_model=False))
    assert sorted(told.split("; ")) == [
        """'passes.map.by' = 'nodes': give "node", "layer" or "kind\"""",
        "unknown key 'passes.map.tops': did you mean 'top'?",
    ]


def test_pass_in_front_of_any_onnx_model_is_refused_by_check(tmp_path: Path) -> None:
    model = {"type": "HfModel", "model_path": str(quickstart.MODEL)}
    findings = check_recipe(saved(tmp_path, recipe(tmp_path, model, **blocks())))
    assert findings.problems == [
        "'passes.map': a loss is located in a quantized ONNX model: put the pass after one that makes it"
    ]


def test_schema_knows_the_pass() -> None:
    made = schema("recipe")
    assert {"by", "top", "reference", "tasks"} <= made["$defs"]["OrtLossMap"]["properties"].keys()
