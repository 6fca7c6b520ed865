"""lm-eval's results as metrics. Pure; knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, TypeGuard

from olive_ext.report.report import Metric


def read_metrics(results: Mapping[str, Any]) -> tuple[Metric, ...]:
    """The numbers of every task and group in lm-eval's `results`, in its order.

    lm-eval names a number "metric,filter" and its error bar "metric_stderr,filter"; what has no filter (name, alias,
    sample_len) is no metric. A direction that lm-eval does not tell counts as higher-is-better, lm-eval's own default.
    """
    return tuple(metric for task in results["results"] for metric in _of_task(task, results))


def _of_task(task: str, results: Mapping[str, Any]) -> Iterator[Metric]:
    values: Mapping[str, Any] = results["results"][task]
    directions = results.get("higher_is_better", {}).get(task) or {}
    for key, value in values.items():
        name, comma, filter_name = key.partition(",")
        if not comma or not _is_number(value) or _is_error_bar(name, filter_name, values):
            continue
        stderr = values.get(f"{name}_stderr,{filter_name}")
        yield Metric(
            task=task,
            metric=name,
            filter=filter_name,
            value=float(value),
            stderr=float(stderr) if _is_number(stderr) else None,
            higher_is_better=directions.get(name) is not False,
            n=_count(task, key, results),
        )


def _is_error_bar(name: str, filter_name: str, values: Mapping[str, Any]) -> bool:
    return name.endswith("_stderr") and f"{name.removesuffix('_stderr')},{filter_name}" in values


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _count(task: str, key: str, results: Mapping[str, Any]) -> int | None:
    """Documents scored: of the task, or in a group of all tasks that have this metric."""
    counted = results.get("n-samples", {}).get(task)
    if counted is not None:
        return int(counted["effective"])
    values = results["results"][task]
    count = (values.get("sample_count") or {}).get(key, values.get("sample_len"))
    return None if count is None else int(count)
