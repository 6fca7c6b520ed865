"""The evaluator as Olive drives it, reports in Olive's form, and the metrics that recipes declare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from olive.evaluator.metric import Metric as DeclaredMetric
from olive.evaluator.metric_result import joint_metric_key
from olive.evaluator.olive_evaluator import OliveEvaluatorConfig

from olive_ext.config import EVALUATOR_TYPE, Bound, ClaimConfig, EvaluationConfig, EvaluationSettings
from olive_ext.errors import ConfigError
from olive_ext.report import Metric, Report
from olive_ext.report.comparison import ALL, Comparison
from olive_ext.report.metrics import comparison_metrics
from olive_ext.workflow import OrtLMEvaluator
from olive_ext.workflow.evaluator import broken_in, text_of, to_metric_result
from olive_ext.workflow.handlers import written
from olive_ext.workflow.passes import deciding_settings
from tests.refusals import refused
from tests.report.test_comparison import divergence
from tests.workflow.recipes import ACC, NORM, REPORT, Measure

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


def declared(name: str, sub_type: str, type_name: str = "accuracy", **more: Any) -> Any:
    return DeclaredMetric(name=name, type=type_name, sub_types=[{"name": sub_type, "priority": 1, **more}])


def test_every_metric_has_its_direction_no_priority_and_the_filter_in_its_key_where_a_task_has_several() -> None:
    result = to_metric_result(REPORT)
    assert {key: entry.value for key, entry in result.items()} == {
        "tiny_choice-acc": 0.5,
        "tiny_choice-acc_stderr": 0.1,
        "tiny_choice-acc_norm": 0.25,
        "tiny_choice-acc_norm_stderr": 0.1,
        "tiny_rolling-word_perplexity": 12.0,
        "tiny_generate-exact_match,strict_match": 0.125,
        "tiny_generate-exact_match,loose": 0.75,
        "size_on_disk-bytes": 1024,
    }
    assert isinstance(result["size_on_disk-bytes"].value, int)
    assert {key for key, entry in result.items() if not entry.higher_is_better} == {
        "tiny_choice-acc_stderr",
        "tiny_choice-acc_norm_stderr",
        "tiny_rolling-word_perplexity",
        "size_on_disk-bytes",
    }
    assert {entry.priority for entry in result.values()} == {-1}


def test_olives_metrics_have_the_verdict_as_an_exit_status() -> None:
    found = Comparison({}, divergences=(divergence("wiki", perplexity_ratio=1.0),))
    report = Report(metrics=comparison_metrics(found), comparison=found)
    least = EvaluationSettings.parse({"tasks": ["t"], "require": ["kl_mean<=1e-9"]}).require
    entries = [to_metric_result(report, bounds=bounds)["verdict-status"] for bounds in ((), least)]
    assert [(entry.value, entry.priority) for entry in entries] == [(0, -1), (1, -1)], "and in no goal of a search"


LESS = {"higher_is_better": False}
SPEED = Metric("tokens_per_second", "tokens_per_second", "none", 1234.5)
DISTANCE = Metric("all", "kl_mean", "none", 0.125, None, False, 6)
COMPARED = Report(metrics=(ACC, replace(DISTANCE, task="tiny_choice", value=0.5), DISTANCE))


@pytest.mark.parametrize(
    ("metric", "report", "expected"),
    [
        (declared("tiny_choice", "accuracy_score"), REPORT, 0.5),
        (declared("tiny_choice/acc_norm", "accuracy_score"), REPORT, 0.25),
        (declared("tiny_rolling", "perplexity", **LESS), REPORT, 12.0),
        (declared("tiny_generate/exact_match,loose", "accuracy_score"), REPORT, 0.75),
        (declared("tiny_generate/exact_match,strict-match", "exact_match"), REPORT, 0.125),
        (declared("tiny_choice", "accuracy_score"), Report(metrics=(NORM,)), 0.25),  # the only one of its task
        (declared("size", "bytes", "size_on_disk"), REPORT, 1024),
        (declared("speed", "avg", "throughput"), Report(metrics=(ACC, SPEED)), 1234.5),
        (declared("kl_mean", "accuracy_score", **LESS), COMPARED, 0.125),
        (declared("all/kl_mean", "accuracy_score", **LESS), COMPARED, 0.125),
        (declared("tiny_choice/kl_mean", "accuracy_score", **LESS), COMPARED, 0.5),
        # the reference itself, whose numbers Olive asks for where a goal is relative to them
        (declared("all/kl_mean", "accuracy_score", **LESS), REPORT, 0),
        (declared("all/top1_agreement", "accuracy_score"), REPORT, 1),
    ],
)
def test_declared_metric_gets_the_value_it_stands_for_and_keeps_its_priority(
    metric: Any, report: Report, expected: float
) -> None:
    result, name, sub_type = to_metric_result(report, [metric]), metric.name, metric.sub_types[0].name
    assert result.get_value(name, sub_type) == expected
    assert result[joint_metric_key(name, text_of(sub_type))].priority == 1


NO_NAME, AGAINST = "unknown_name", "contradiction"


@pytest.mark.parametrize(
    ("metric", "code", "words"),
    [
        (declared("arc", "accuracy_score"), NO_NAME, "'arc' 'accuracy_score'"),
        (declared("speed", "avg", "throughput"), NO_NAME, "'speed'"),
        (declared("tokens_per_second", "accuracy_score"), NO_NAME, "tokens_per_second"),
        (declared("tiny_choice", "f1_score"), NO_NAME, "tiny_choice/acc, tiny_choice/acc_norm"),
        (
            declared("tiny_generate", "exact_match"),
            NO_NAME,
            "exact_match,strict-match, tiny_generate/exact_match,loose",
        ),
        (declared("tiny_rolling", "perplexity"), AGAINST, "tiny_rolling/word_perplexity lower"),
        (declared("tiny_choice", "accuracy_score", higher_is_better=False), AGAINST, "higher"),
        (declared("all/kl_mean", "accuracy_score"), AGAINST, "all/kl_mean lower"),
    ],
)
def test_declared_metric_that_cannot_be_answered_is_refused_with_what_there_is(
    metric: Any, code: str, words: str
) -> None:
    with refused(ConfigError, code, holds=tuple(words.split())):
        to_metric_result(COMPARED if "all/" in metric.name else REPORT, [metric])


BOUND = {"metric": "accuracy_difference", "min": -0.02}


def test_claim_of_a_recipe_is_handed_on_and_is_a_part_of_the_key_of_olives_caches() -> None:
    def enough(**values: Any) -> dict[str, Any]:
        return {"tasks": ["a"], "reference": "float", "documents": "enough", "require": [BOUND], **values}

    given = written(EvaluationSettings.parse(enough()))
    assert EvaluationConfig.parse({**given, "model": {"path": "m"}}).claim == ClaimConfig(above=-0.02)
    assert "require" in deciding_settings(enough())
    assert "require" not in deciding_settings(enough(documents="all"))
    assert deciding_settings(enough()) != deciding_settings(enough(require=[{**BOUND, "min": -0.01}]))


def test_bounds_hold_for_no_number_of_drawn_documents_alone_and_for_no_open_claim() -> None:
    drawn = Metric("wiki", "word_perplexity", "none", 9.0, None, False, 5, 40, is_estimate=False)
    claimed = Metric(ALL, "accuracy_difference", "none", 0.0, None, True, 5, 40)
    opened = Metric("open_claim", "open_claim_accuracy_difference", "none", 1.0, None, False)
    asked = [
        Bound.parse({"metric": "word_perplexity", "max": 10}),
        Bound.parse({"metric": "accuracy_difference", "min": -0.9}),
    ]
    assert broken_in(to_metric_result(Report((replace(drawn, is_estimate=True), claimed)), bounds=asked), asked) == []
    found = broken_in(to_metric_result(Report((drawn, claimed, opened)), bounds=asked), asked)
    assert [reason.words.split()[0] for reason in found] == ["wiki/word_perplexity", "all/accuracy_difference"]
