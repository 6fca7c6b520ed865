"""The evaluator as Olive drives it."""

from __future__ import annotations

from typing import Any

import pytest
from olive.evaluator.metric import Metric as DeclaredMetric
from olive.evaluator.olive_evaluator import OliveEvaluatorConfig
from olive.model import ModelConfig

from olive_ext.config import EVALUATOR_TYPE, EvaluationSettings
from olive_ext.workflow import OrtLMEvaluator
from olive_ext.workflow.current_run import Run, running
from olive_ext.workflow.evaluator import measure
from tests.exports import genai_export
from tests.workflow.recipes import Evaluate, Measure

LM_EVALUATOR_KEYS: dict[str, Any] = {
    "tasks": ["arc_easy", "size_on_disk"],
    "limit": 3,
    "batch_size": 1,
    "max_length": 128,
    "execution_provider": "CPUExecutionProvider",
    "provider_options": {"enable_skip_layer_norm_strict_mode": "1"},
    "device": "cpu",
    "bootstrap_iters": 0,
    "model_class": "ortgenai",
    "model_args": {},
    "apply_chat_template": True,
    "system_instruction": "be short",
    "fewshot_as_multiturn": True,
    "num_fewshot": 2,
    "sample_log_num": 1,
    "sample_log_dir": "logs",
}


def evaluator(fake: Measure, **settings: Any) -> OrtLMEvaluator:
    class Faked(OrtLMEvaluator):
        measure = staticmethod(fake)

    return Faked(**{"tasks": ["tiny_choice"], **settings})


def test_all_keys_of_olives_evaluator_are_taken() -> None:
    config = OliveEvaluatorConfig(type=EVALUATOR_TYPE, **LM_EVALUATOR_KEYS)
    made = config.create_evaluator()
    assert made.settings.model_dump(include=set(LM_EVALUATOR_KEYS)) == LM_EVALUATOR_KEYS


def test_recipes_own_lists_and_mappings_are_left_alone() -> None:
    task = {"task": "inline", "metadata": {}}
    made = OrtLMEvaluator(tasks=[task])
    made.settings.tasks[0]["metadata"]["written"] = True
    assert task == {"task": "inline", "metadata": {}}


def test_model_device_and_providers_reach_the_measurement_and_declared_metrics_its_results() -> None:
    metrics = [
        DeclaredMetric(name="tiny_choice", type="accuracy", sub_types=[{"name": "accuracy_score", "priority": 1}]),
        DeclaredMetric(name="size", type="size_on_disk", sub_types=[{"name": "bytes", "priority": 2}]),
    ]
    fake, model = Measure(), object()
    result = evaluator(fake).evaluate(model, metrics, device="cpu", execution_providers="CPUExecutionProvider")
    (call,) = fake.calls
    assert (call["model"], call["device"], call["execution_providers"]) == (model, "cpu", "CPUExecutionProvider")
    assert call["settings"].tasks == ["tiny_choice", "size_on_disk"]
    assert result.get_value("tiny_choice", "accuracy_score") == 0.5
    assert result.get_value("size", "bytes") == 1024
    assert result.get_value("tiny_choice", "acc_norm") == 0.25


@pytest.mark.parametrize(
    ("keys", "journal"),
    [
        ({}, "cache/answers"),
        ({"output_dir": "reports"}, "reports/input_model/journal/answers"),
        ({"use_cache": "own"}, "own"),
        ({"tasks": ["tiny_choice", "tokens_per_second"]}, None),
    ],
)
def test_answers_of_a_workflow_are_kept_in_olives_cache_where_no_other_place_is_named(
    keys: dict[str, Any], journal: str | None
) -> None:
    """A second run makes its evaluations anew. Where times are measured, nothing is kept."""
    model = ModelConfig(type="ONNXModel", config={"model_path": str(genai_export("llama"))})
    settings, fake = EvaluationSettings.parse({"tasks": ["tiny_choice"], **keys}), Evaluate()
    token = running.set(Run(model, answers="cache/answers"))
    try:
        measure(model.create_model(), settings, evaluate=fake)
    finally:
        running.reset(token)
    assert fake.configs[0].journal == journal
    measure(model.create_model(), settings, evaluate=fake)
    assert (fake.configs[1].journal is None) == (not {*keys} - {"tasks"}), "without a workflow"
