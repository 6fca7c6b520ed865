"""Sections of Olive's own metrics: what they resolve to, and the mistakes that are named before Olive is imported."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from olive_ext.check import check_recipe, mistakes
from olive_ext.errors import ConfigError
from olive_ext.plugins.speech.settings import PARAMETERS, SUB_TYPES, VISION_TASKS, with_named_metrics
from tests.refusals import assert_says, refused

METRIC: dict[str, Any] = {
    "name": "speech",
    "type": "accuracy",
    "data_config": "tones",
    "sub_types": [{"name": "wer", "priority": 1}, {"name": "rtfx", "priority": 2}],
}
RECIPE: dict[str, Any] = {
    "input_model": {"type": "HfModel", "model_path": "model"},
    "data_configs": [
        {
            "name": "tones",
            "type": "HuggingfaceContainer",
            "pre_process_data_config": {
                "type": "speech_transcription_pre_process",
                "params": {"audio_col": "audio", "limit": 8},
            },
        }
    ],
    "evaluators": {"e": {"type": "OrtEvaluator", "metrics": [METRIC]}},
    "evaluator": "e",
}


def changed(*path: Any, value: Any) -> dict[str, Any]:
    recipe = copy.deepcopy(RECIPE)
    *parents, last = path
    block: Any = recipe
    for part in parents:
        block = block[part]
    block[last] = value
    return recipe


METRICS = ("evaluators", "e", "metrics")
FIRST = (*METRICS, 0)
REQUIRE = ("evaluators", "e", "require")
OCR = {"type": "vision_vqa_pre_process", "params": {"task": "vision-ocr"}}
PARAMS = ("data_configs", 0, "pre_process_data_config", "params")


def test_section_is_told_with_its_metrics_and_their_data(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(RECIPE), encoding="utf-8")
    findings = check_recipe(path)
    assert findings.problems == []
    assert "evaluators.e  OrtEvaluator, metrics: speech (wer, rtfx) of tones" in findings.text()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (METRICS, [], {"code": "missing", "field": "evaluators.e.metrics"}),
        (METRICS, [3], {"code": "wrong_value", "field": "evaluators.e.metrics.0", "value": 3}),
        (METRICS, ["speech"], {"code": "wrong_value", "field": "evaluators.e.metrics.0", "value": "speech"}),
        (
            (*FIRST, "type"),
            "acuracy",
            {
                "code": "wrong_value",
                "field": "evaluators.e.metrics.speech.type",
                "value": "acuracy",
                "holds": "speech.type",
            },
        ),
        (
            (*FIRST, "sub_types"),
            [],
            {
                "code": "missing",
                "field": "evaluators.e.metrics.speech.sub_types",
                "holds": ("speech.sub_types", "exact_match"),
            },
        ),
        (
            (*FIRST, "sub_types", 0, "name"),
            "werr",
            {
                "code": "unknown_name",
                "field": "evaluators.e.metrics.speech.sub_types",
                "value": "werr",
                "holds": "speech.sub_types",
            },
        ),
        (
            (*FIRST, "sub_types", 0, "name"),
            "zz",
            {
                "code": "unknown_name",
                "field": "evaluators.e.metrics.speech.sub_types",
                "value": "zz",
                "holds": ("accuracy", "exact_match"),
            },
        ),
        (
            (*FIRST, "sub_types", 0, "name"),
            "exact_match",
            {
                "code": "contradiction",
                "field": "evaluators.e.metrics.speech.sub_types",
                "value": ["exact_match", "rtfx"],
            },
        ),
        (
            (*FIRST, "data_config"),
            "tone",
            {
                "code": "unknown_name",
                "field": "evaluators.e.metrics.speech.data_config",
                "value": "tone",
                "holds": ("data_configs", "speech.data_config"),
            },
        ),
        (
            (*FIRST, "data_config"),
            None,
            {
                "code": "missing",
                "field": "evaluators.e.metrics.speech.data_config",
                "holds": ("data_configs", "speech.data_config"),
            },
        ),
        (
            PARAMS,
            {"audio_cols": "a"},
            {
                "code": "unknown_key",
                "field": "data_configs.tones.pre_process_data_config.params.audio_cols",
                "value": "a",
                "holds": "pre_process_data_config.params.audio_cols",
            },
        ),
        (METRICS, [METRIC, METRIC], {"code": "contradiction", "field": "evaluators.e.metrics", "holds": "speech"}),
        (
            METRICS,
            [METRIC, {**METRIC, "name": "speech_sentences", "type": "custom"}],
            {"code": "contradiction", "field": "evaluators.e.metrics", "holds": "speech_sentences"},
        ),
        (
            METRICS,
            [{**METRIC, "sub_types": [{"name": "exact_match"}], "data_config": {"pre_process_data_config": OCR}}],
            {
                "code": "contradiction",
                "field": "evaluators.e.metrics.speech.sub_types",
                "value": "exact_match",
                "holds": ("vision-ocr", "vision-vqa"),
            },
        ),
        (
            REQUIRE,
            [{"task": "speech", "metric": "were", "max": 1}],
            {"code": "unknown_name", "field": "evaluators.e.require", "holds": ("were", "speech")},
        ),
        (
            REQUIRE,
            [{"metric": "accuracy_difference", "min": 0}],
            {"code": "missing", "field": "evaluators.e.require", "holds": "reference"},
        ),
        (
            ("evaluators", "e", "reference"),
            {"path": "x", "top": 4},
            {"code": "contradiction", "field": "evaluators.e", "holds": "reference.top"},
        ),
        (
            ("evaluators", "e", "langage"),
            "de",
            {"code": "unknown_key", "field": "evaluators.e.langage", "value": "de", "holds": "language"},
        ),
        (
            ("evaluators", "e", "tasks"),
            "STS17",
            {"code": "wrong_value", "field": "evaluators.e.tasks", "value": "STS17"},
        ),
        (
            ("evaluators", "e", "user_script"),
            "none.py",
            {"code": "not_found", "field": "evaluators.e.user_script", "value": "none.py"},
        ),
        (
            ("evaluators", "e", "type"),
            "OrtEvaluater",
            {"code": "unknown_name", "field": "evaluators.e.type", "value": "OrtEvaluater", "holds": "OrtEvaluator"},
        ),
    ],
)
def test_mistake_is_named(path: tuple[Any, ...], value: Any, problem: dict[str, Any]) -> None:
    (error,) = mistakes(changed(*path, value=value), has_model=False)
    assert_says(error, **problem)


def test_metrics_are_found_by_name_and_the_only_evaluator_is_used() -> None:
    recipe = changed(*METRICS, value=["speech"])
    del recipe["evaluator"]
    settled = with_named_metrics({**recipe, "metrics": [METRIC]})
    assert settled["evaluators"]["e"]["metrics"] == [METRIC]
    assert "metrics" not in settled
    assert (settled["evaluator"], settled["evaluate_input_model"]) == ("e", True)
    with refused(ConfigError, "wrong_value", "evaluators.e.metrics.0", "speech"):
        with_named_metrics({**recipe, "metrics": [{**METRIC, "name": "other"}]})


def test_recipe_of_others_is_left_as_it_is() -> None:
    recipe = {**changed("evaluators", "e", "type", value="LMEvaluator"), "metrics": [METRIC]}
    assert with_named_metrics(recipe) is recipe


def test_names_are_olives() -> None:
    import inspect

    from olive.data.component import pre_process_data
    from olive.evaluator import metric, olive_evaluator

    for kind, enumeration in (("accuracy", "Accuracy"), ("latency", "Latency"), ("throughput", "Throughput")):
        assert set(SUB_TYPES[kind]) == {one.value for one in getattr(metric, f"{enumeration}SubType")}
    assert set(SUB_TYPES) == {one.value for one in metric.MetricType}
    assert {task: {kind} for task, kind in VISION_TASKS.items()} == olive_evaluator._VISION_TASK_METRIC_MAP
    for name, accepted in PARAMETERS.items():
        own = set(inspect.signature(getattr(pre_process_data, name)).parameters) - {"dataset", "kwargs"}
        assert own <= set(accepted)
