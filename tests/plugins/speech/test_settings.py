"""Sections of Olive's own metrics: what they resolve to, and the mistakes that are named before Olive is imported."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from olive_ext.check import check_recipe, mistakes, refuse
from olive_ext.errors import ConfigError, OliveExtError
from olive_ext.plugins.speech.settings import PARAMETERS, SUB_TYPES, VISION_TASKS, with_named_metrics
from tests.exports.quickstart import MODEL
from tests.refusals import refused

METRIC: dict[str, Any] = {
    "name": "speech",
    "type": "accuracy",
    "data_config": "tones",
    "sub_types": [{"name": "wer", "priority": 1}, {"name": "rtfx", "priority": 2}],
}
RECIPE: dict[str, Any] = {
    "input_model": {"type": "HfModel", "model_path": str(MODEL)},
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
PICTURES = {
    **METRIC,
    "sub_types": [{"name": "exact_match"}],
    "data_config": {"pre_process_data_config": {"type": "vision_vqa_pre_process", "params": {"task": "vision-ocr"}}},
}
PARAMS = ("data_configs", 0, "pre_process_data_config", "params")


def test_section_is_told_with_its_metrics_and_their_data(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(RECIPE), encoding="utf-8")
    findings = check_recipe(path)
    assert findings.problems == []
    assert "evaluators.e  OrtEvaluator, metrics: speech (wer, rtfx) of tones" in findings.text()


M, D = "evaluators.e.metrics", "data_configs.tones.pre_process_data_config.params"


@pytest.mark.parametrize(
    ("path", "value", "code", "field", "holds"),
    [
        (METRICS, [], "missing", M, "wer"),
        (METRICS, [3], "wrong_value", f"{M}.0", "mapping"),
        (METRICS, ["speech"], "unknown_name", f"{M}.0", "'speech'"),
        ((*FIRST, "type"), "acuracy", "wrong_value", f"{M}.speech.type", "accuracy"),
        ((*FIRST, "sub_types"), [], "missing", f"{M}.speech.sub_types", "wer, rtfx, exact_match"),
        ((*FIRST, "sub_types", 0, "name"), "werr", "unknown_name", f"{M}.speech.sub_types", "'wer'"),
        ((*FIRST, "sub_types", 0, "name"), "zz", "unknown_name", f"{M}.speech.sub_types", "wer, rtfx, exact_match"),
        ((*FIRST, "sub_types", 0, "name"), "exact_match", "contradiction", f"{M}.speech.sub_types", "wer"),
        ((*FIRST, "data_config"), "tone", "unknown_name", f"{M}.speech.data_config", "tones"),
        ((*FIRST, "data_config"), None, "missing", f"{M}.speech.data_config", "'data_configs'"),
        (PARAMS, {"audio_cols": "a"}, "unknown_key", f"{D}.audio_cols", "'audio_col'"),
        (METRICS, [METRIC, METRIC], "contradiction", M, "'speech'"),
        (
            METRICS,
            [METRIC, {**METRIC, "name": "speech_sentences", "type": "custom"}],
            "contradiction",
            M,
            "_sentences'",
        ),
        (METRICS, [PICTURES], "contradiction", f"{M}.speech.sub_types", ("'vision-vqa'", "'vision-ocr'")),
        (REQUIRE, [{"task": "speech", "metric": "were", "max": 1}], "unknown_name", "evaluators.e.require", "'were'"),
        (REQUIRE, [{"metric": "accuracy_difference", "min": 0}], "missing", "evaluators.e.require", "'reference'"),
        (("evaluators", "e", "reference"), {"path": "x", "top": 4}, "contradiction", "evaluators.e", "reference.top"),
        (("evaluators", "e", "langage"), "de", "unknown_key", "evaluators.e.langage", "'language'"),
        (("evaluators", "e", "tasks"), "STS17", "wrong_value", "evaluators.e.tasks", "STS17"),
        (("evaluators", "e", "user_script"), "none.py", "not_found", "evaluators.e.user_script", "none.py"),
        (("evaluators", "e", "type"), "OrtEvaluater", "unknown_name", "evaluators.e.type", "'OrtEvaluator'"),
    ],
)
def test_mistake_is_named(path: tuple[Any, ...], value: Any, code: str, field: str, holds: str) -> None:
    with refused(OliveExtError, code, field, holds=holds):
        refuse(mistakes(changed(*path, value=value), has_model=False))


def test_metrics_are_found_by_name_and_the_only_evaluator_is_used() -> None:
    recipe = changed(*METRICS, value=["speech"])
    del recipe["evaluator"]
    settled = with_named_metrics({**recipe, "metrics": [METRIC]})
    assert settled["evaluators"]["e"]["metrics"] == [METRIC]
    assert "metrics" not in settled
    assert (settled["evaluator"], settled["evaluate_input_model"]) == ("e", True)
    with refused(ConfigError, "unknown_name", "evaluators.e.metrics.0", "speech"):
        with_named_metrics({**recipe, "metrics": [{**METRIC, "name": "other"}]})
    of_others = {**changed("evaluators", "e", "type", value="LMEvaluator"), "metrics": [METRIC]}
    assert with_named_metrics(of_others) is of_others


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
