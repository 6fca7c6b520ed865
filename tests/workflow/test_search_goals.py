"""Goals, models that a search meets twice, and a search without a result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from olive.engine.footprint import Footprint
from olive.evaluator.metric_result import MetricResult
from olive.evaluator.olive_evaluator import OliveEvaluatorConfig

from olive_ext.config import EVALUATOR_TYPE
from olive_ext.errors import RequirementError
from olive_ext.workflow import register
from olive_ext.workflow.olive_run import refuse_no_output
from olive_ext.workflow.registration import resolve_goals, thresholds, wrap_once

METRICS: list[dict[str, Any]] = [
    {"name": "size", "type": "size_on_disk", "sub_types": [{"name": "bytes", "priority": 1}]},
    {
        "name": "all/kl_mean",
        "type": "accuracy",
        "sub_types": [
            {
                "name": "accuracy_score",
                "priority": 2,
                "higher_is_better": False,
                "goal": {"type": "threshold", "value": 0.02},
            }
        ],
    },
]
KEY = "all/kl_mean-accuracy_score"


def evaluator(kind: str = EVALUATOR_TYPE) -> Any:
    return OliveEvaluatorConfig(type=kind, name="e", tasks=["t"], metrics=METRICS)


def resolved(config: Any, answer: dict[str, float | None]) -> dict[str, float]:
    class FakeEngine:
        evaluator_config = config
        input_passes_configs = None

        def resolve_goals(self, model: Any, model_id: str, metrics: Any, spec: Any) -> dict[str, float | None]:
            return answer

    wrap_once(FakeEngine, "resolve_goals", resolve_goals)
    return FakeEngine().resolve_goals(None, "id", config.metrics, None)  # type: ignore[return-value]


def test_thresholds_are_goals_where_olive_finds_none() -> None:
    assert thresholds(evaluator().metrics) == {KEY: 0.02}
    assert resolved(evaluator(), {}) == {KEY: 0.02}


def test_goals_that_olive_resolves_stay() -> None:
    assert resolved(evaluator(), {"other": 3.0, "size-bytes": None}) == {KEY: 0.02, "other": 3.0}


def test_goals_of_other_evaluators_are_left_alone() -> None:
    assert resolved(evaluator("LMEvaluator"), {}) == {}


def test_model_that_candidates_share_is_recorded_again() -> None:
    register()
    footprint = Footprint()
    for path in ("a", "b"):
        footprint.record(model_id="shared", parent_model_id="in", model_config={"config": {"model_path": path}})
    assert footprint.get_model_path("shared") == "b"


def search_output(*values: float, has_model: bool = False) -> Any:
    metrics = [{KEY: {"value": value, "priority": 2, "higher_is_better": False}} for value in values]
    nodes = {
        str(number): SimpleNamespace(
            parent_model_id="in", metrics=SimpleNamespace(value=MetricResult.model_validate(found))
        )
        for number, found in enumerate(metrics)
    }
    objectives = {"size-bytes": {"higher_is_better": False}, KEY: {"higher_is_better": False, "goal": 0.02}}
    footprint = SimpleNamespace(nodes=nodes, objective_dict=objectives)
    return SimpleNamespace(footprint=footprint, has_output_model=lambda: has_model)


def test_search_without_a_model_that_meets_the_goals_is_a_failure_that_tells_how_near_it_came() -> None:
    engine = SimpleNamespace(evaluator_config=evaluator(), input_passes_configs=None)
    with pytest.raises(RequirementError) as raised:
        refuse_no_output(engine, search_output(0.5, 0.25))
    assert str(raised.value) == (
        "none of 2 candidates of the search meets all goals: all/kl_mean-accuracy_score <= 0.02 (best 0.25)"
    )
    refuse_no_output(engine, search_output(0.5, has_model=True))
    refuse_no_output(engine, search_output())
