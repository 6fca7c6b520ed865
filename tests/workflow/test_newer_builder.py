"""With an onnxruntime-genai that the installed Olive cannot drive: what is there already is evaluated, and a recipe
that would build is refused before anything runs. `.ci/run` runs it with 0.18 and another ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from olive_ext.check import check_recipe
from olive_ext.package_versions import installed
from olive_ext.report import from_json
from olive_ext.workflow import cli_run
from tests.exports.quickstart import QUICKSTART, TASKS, exported
from tests.refusals import assert_says
from tests.workflow.recipes import recipe, saved

pytestmark = pytest.mark.other_env


def test_quickstart_by_its_own_recipe_is_refused() -> None:
    (error,) = check_recipe(QUICKSTART / "recipe.json").errors
    assert_says(error, "unsupported", "passes.int4.type", "ModelBuilder", holds=installed("onnxruntime-genai"))


def test_quickstart_by_an_onnx_input_runs(tmp_path: Path) -> None:
    """The model that this builder makes is quantized by Olive and compared with its own float form."""
    evaluator = {
        "type": "OrtLMEvaluator",
        "tasks": ["quickstart_choice", "quickstart_generate"],
        "include_path": str(TASKS),
        "limit": 40,
        "reference": "input_model",
        "require": [{"metric": "top1_agreement", "min": 0.9}],
        "output_dir": str(tmp_path / "report"),
    }
    blocks = {
        "passes": {"int4": {"type": "OnnxBlockWiseRtnQuantization", "block_size": 32}},
        "evaluators": {"e": evaluator},
        "evaluator": "e",
    }
    model = {"type": "ONNXModel", "model_path": str(exported()), "onnx_file_name": "model.onnx"}
    assert cli_run(["--config", saved(tmp_path, recipe(tmp_path, model, **blocks))]) == 0
    text = (tmp_path / "report" / "int4" / "report.json").read_text(encoding="utf-8")
    comparison = from_json(text).comparison
    assert "quickstart_choice" in {item.task for item in comparison.divergences}
