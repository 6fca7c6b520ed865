"""What stands in the way of a search with Olive 0.13: goals that it forgets, models that it meets twice, an end
without a model that it does not call a failure. Knows no model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from olive.evaluator.metric_result import joint_metric_key

from olive_ext.errors import RequirementError
from olive_ext.workflow.preflight import our_evaluators


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


def update(original: Callable[..., Any]) -> Callable[..., Any]:
    """Olive's `FootprintNode.update`, which is called where candidates share their first passes.

    Olive 0.13 writes to the field by its alias "model_config", which pydantic refuses: every candidate behind the first
    fails.
    """

    def _update(self: Any, **values: Any) -> None:
        config = {"model_config_data": values.pop("model_config")} if "model_config" in values else {}
        original(self, **values, **config)

    return _update


def refuse_no_output(engine: Any, output: Any) -> None:
    """Raises `RequirementError` where candidates were evaluated and none meets our evaluators' goals."""
    if output.has_output_model() or not any(our_evaluators(engine)):
        return
    nodes = [node for node in output.footprint.nodes.values() if node.metrics and node.parent_model_id is not None]
    goals = {name: item for name, item in output.footprint.objective_dict.items() if item.get("goal") is not None}
    if nodes and goals:
        told = ", ".join(_told(name, item, nodes) for name, item in goals.items())
        raise RequirementError(f"none of {len(nodes)} candidates of the search meets all goals: {told}")


def _told(name: str, objective: Any, nodes: Any) -> str:
    values = [node.metrics.value[name].value for node in nodes]
    best, sign = (max(values), ">=") if objective["higher_is_better"] else (min(values), "<=")
    return f"{name} {sign} {objective['goal']:g} (best {best:g})"
