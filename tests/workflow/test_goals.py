"""Thresholds as goals."""

from __future__ import annotations

from typing import Any

from olive.evaluator.olive_evaluator import OliveEvaluatorConfig

from olive_ext.config import EVALUATOR_TYPE
from olive_ext.workflow.goals import resolve_goals, thresholds

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

    FakeEngine.resolve_goals = resolve_goals(FakeEngine.resolve_goals)
    return FakeEngine().resolve_goals(None, "id", config.metrics, None)  # type: ignore[return-value]


def test_thresholds_are_goals_where_olive_finds_none() -> None:
    assert thresholds(evaluator().metrics) == {KEY: 0.02}
    assert resolved(evaluator(), {}) == {KEY: 0.02}


def test_goals_that_olive_resolves_stay() -> None:
    assert resolved(evaluator(), {"other": 3.0, "size-bytes": None}) == {KEY: 0.02, "other": 3.0}


def test_goals_of_other_evaluators_are_left_alone() -> None:
    assert resolved(evaluator("LMEvaluator"), {}) == {}
