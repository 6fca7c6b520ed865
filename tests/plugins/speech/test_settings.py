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
from tests.refusals import refused

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
        (METRICS, [], "'evaluators.e.metrics' is missing"),
        (METRICS, [3], "'evaluators.e.metrics.0' = 3: give a mapping"),
        (METRICS, ["speech"], "'evaluators.e.metrics.0' = 'speech': not in 'metrics', which the recipe does not have"),
        ((*FIRST, "type"), "acuracy", "speech.type' = 'acuracy': give accuracy, latency"),
        ((*FIRST, "sub_types"), [], "speech.sub_types' is missing: give wer, rtfx, exact_match"),
        ((*FIRST, "sub_types", 0, "name"), "werr", "speech.sub_types' has 'werr': did you mean 'wer'"),
        ((*FIRST, "sub_types", 0, "name"), "zz", "has 'zz': a metric of type 'accuracy' has wer, rtfx, exact_match"),
        ((*FIRST, "sub_types", 0, "name"), "exact_match", "= exact_match, rtfx: put wer and rtfx into"),
        ((*FIRST, "data_config"), "tone", "speech.data_config' = 'tone': not in 'data_configs', which has tones"),
        ((*FIRST, "data_config"), None, "speech.data_config' is missing: name one of 'data_configs'"),
        (PARAMS, {"audio_cols": "a"}, "pre_process_data_config.params.audio_cols': did you mean 'audio_col'? Olive"),
        (METRICS, [METRIC, METRIC], "'evaluators.e.metrics' has 'speech' twice"),
        (METRICS, [METRIC, {**METRIC, "name": "speech_sentences", "type": "custom"}], "has 'speech_sentences' twice"),
        (
            METRICS,
            [{**METRIC, "sub_types": [{"name": "exact_match"}], "data_config": {"pre_process_data_config": OCR}}],
            "has 'exact_match', and its data the task 'vision-ocr': Olive measures exact_match of 'vision-vqa', ",
        ),
        (
            REQUIRE,
            [{"task": "speech", "metric": "were", "max": 1}],
            "no metric 'were' of task 'speech' is measured",
        ),
        (REQUIRE, [{"metric": "accuracy_difference", "min": 0}], "it needs 'reference'"),
        (("evaluators", "e", "reference"), {"path": "x", "top": 4}, "reference.top': the answers alone are compared"),
        (("evaluators", "e", "langage"), "de", "unknown key 'evaluators.e.langage': did you mean 'language'?"),
        (("evaluators", "e", "tasks"), "STS17", "'evaluators.e.tasks'"),
        (("evaluators", "e", "user_script"), "none.py", "'evaluators.e.user_script' = 'none.py': does not exist"),
        (("evaluators", "e", "type"), "OrtEvaluater", "did you mean 'OrtEvaluator'?"),
    ],
)
def test_mistake_is_named(path: tuple[Any, ...], value: Any, problem: str) -> None:
    (found,) = map(str, mistakes(changed(*path, value=value), has_model=False))
    assert problem in found


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
