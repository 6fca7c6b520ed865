"""From the name of a metric, as recipes write it, to the metric of a report. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from olive_ext.report.comparison import ALL
from olive_ext.report.report import Metric


def matching(
    metrics: Iterable[Metric], name: str, task: str | None = None, filter_name: str | None = None
) -> list[Metric]:
    """The metrics that a name may stand for; exactly one where all is well.

    Without a task `name` may also be a task's ("size_on_disk"), or a long name ("task/metric", "task/metric,filter"),
    and a comparison over all tasks goes before those of single tasks. A metric whose filter is "" may have any.
    """
    found = [
        metric
        for metric in metrics
        if task in (None, metric.task)
        and filter_name in (None, metric.filter or filter_name)
        and (name == metric.metric or (task is None and name in (metric.task, *long_names(metric))))
    ]
    return [metric for metric in found if metric.task == ALL] or found


def long_names(metric: Metric) -> tuple[str, str]:
    """ "task/metric" and "task/metric,filter"."""
    short = f"{metric.task}/{metric.metric}"
    return short, f"{short},{metric.filter}"


def listed(metrics: Iterable[Metric]) -> str:
    """The names to choose from, with the filter where the short name would not tell."""
    names = [long_names(metric) for metric in metrics]
    short = [name for name, _ in names]
    return ", ".join(long if short.count(name) > 1 else name for name, long in names) or "none"
