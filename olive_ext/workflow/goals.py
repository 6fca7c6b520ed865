"""Goals of declared metrics that Olive forgets. Knows no model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from olive.evaluator.metric_result import joint_metric_key

from olive_ext.workflow.early import our_evaluators


def resolve_goals(original: Callable[..., Any]) -> Callable[..., Any]:
    """Olive's `Engine.resolve_goals`, with the thresholds of our evaluators' metrics.

    Olive 0.13 returns no goals at all where every goal is a threshold: it looks for the input model's numbers, which
    only the other types of goal need, and gives up without them.
    """
    signature = inspect.signature(original)

    def _resolve_goals(self: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = signature.bind(self, *args, **kwargs).arguments["metrics"]
        found = original(self, *args, **kwargs)
        if not any(metrics is evaluator.metrics for _, evaluator in our_evaluators(self)):
            return found
        return {**thresholds(metrics), **{name: goal for name, goal in found.items() if goal is not None}}

    return _resolve_goals


def thresholds(metrics: Any) -> dict[str, float]:
    """Olive's key of each declared metric with a priority and a goal of type "threshold", and that goal's value."""
    return {
        joint_metric_key(metric.name, sub_type.name): sub_type.goal.value
        for metric in metrics
        for sub_type in metric.sub_types
        if sub_type.priority > 0 and sub_type.goal is not None and sub_type.goal.type == "threshold"
    }
