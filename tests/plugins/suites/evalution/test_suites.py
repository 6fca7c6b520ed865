"""Whole suites of Evalution through its own `run` give the numbers of its transformers engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import evalution
import pytest
from evalution.engines import TransformersCompat

from olive_ext.plugins.suites.evalution import OrtEngine
from tests.exports import genai_export, hf_model
from tests.plugins.suites.evalution.suites import all_suites, hellaswag_rows, mmlu_rows

pytestmark = [pytest.mark.slow, pytest.mark.other_env]

SCRIPT = Path(__file__).resolve().parents[4] / "docs" / "benchmarks" / "evalution_engines.py"


def run(engine: Any, path: object) -> Any:
    return evalution.run(model={"path": str(path)}, engine=engine, tests=all_suites())


@pytest.fixture(scope="module")
def results() -> tuple[Any, Any]:
    ours = run(OrtEngine(), genai_export("llama"))
    return ours, run(TransformersCompat(dtype="float32", device="cpu", batch_size=1), hf_model("llama"))


def test_metrics_equal(results: tuple[Any, Any]) -> None:
    ours, theirs = ({test.name: test.metrics for test in result.tests} for result in results)
    assert len(ours) == 3
    assert ours == theirs


def test_predictions_of_every_sample_equal(results: tuple[Any, Any]) -> None:
    ours, theirs = ([[sample.prediction for sample in test.samples] for test in result.tests] for result in results)
    assert [len(predictions) for predictions in ours] == [24, 24, 16]
    assert ours == theirs


def test_benchmark_finds_equal_answers_on_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "hf").symlink_to(hf_model("llama"), target_is_directory=True)
    (tmp_path / "fp32").symlink_to(genai_export("llama"), target_is_directory=True)
    for name, rows in {"mmlu-dev": mmlu_rows, "mmlu-test": mmlu_rows, "hellaswag-validation": hellaswag_rows}.items():
        lines = [json.dumps(row) for row in rows(name.partition("-")[2])]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = [str(tmp_path), "--data", str(tmp_path), "--suites", "mmlu,hellaswag", "--rows", "4", "--batch-sizes", "1"]
    command = [sys.executable, str(SCRIPT), *words, "--output", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    table = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["table"]
    assert [(row["suite"], row["agree"]) for row in table] == [("mmlu", True), ("hellaswag", True)]
    assert all(row["ratio_processor"] > 0 for row in table)
    assert done.stdout.count("| equal |") == 2


def test_result_is_json_and_says_how_the_model_ran(results: tuple[Any, Any]) -> None:
    ours = json.loads(json.dumps(results[0].to_dict()))
    assert ours["engine"]["resolved_engine"] == "OrtEngine"
    assert ours["engine"]["execution"]["providers"] == ["CPUExecutionProvider"]
