"""Whole suites of Evalution through its own `run` give the numbers of its transformers engine."""

from __future__ import annotations

import json
from typing import Any

import evalution
import pytest
from evalution.engines import TransformersCompat

from olive_ext.backends.evalution import OrtEngine
from tests.backends.evalution.suites import all_suites
from tests.exports import genai_export, hf_model

pytestmark = [pytest.mark.slow, pytest.mark.other_env]


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


def test_result_is_json_and_says_how_the_model_ran(results: tuple[Any, Any]) -> None:
    ours = json.loads(json.dumps(results[0].to_dict()))
    assert ours["engine"]["resolved_engine"] == "OrtEngine"
    assert ours["engine"]["execution"]["providers"] == ["CPUExecutionProvider"]
