"""Conversion of a report to Olive's `MetricResult`, and the metrics that a recipe declares for goals and search.

Olive knows only its own names of metrics ("accuracy_score", "bytes"); their meaning is decided here. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from olive.evaluator.metric_result import MetricResult, joint_metric_key

from olive_ext.config import Bound
from olive_ext.errors import ConfigError, ContradictionError
from olive_ext.report import Metric, Report
from olive_ext.report.comparison import ALL
from olive_ext.report.metrics import COMPARISON_NAMES, is_open, listed, matching, non_finite_requests
from olive_ext.report.report import has_several_filters
from olive_ext.report.verdict import EXIT_STATUS
from olive_ext.run.bounds import DECLARABLE, broken_bounds, single_bounds
from olive_ext.run.costs import SIZE_ON_DISK, why_missing

_ONE_OF_ITSELF = ("top1_agreement", "perplexity_ratio", "mcnemar_p")
"""The metrics of a comparison that are 1 for a model compared with itself; the others are 0."""

_READ = ("kl_mean", "top1_agreement", "accuracy_difference", "accuracy_difference_low", "accuracy_difference_high")
"""The metrics of a comparison, over all tasks, that Olive's run history has."""

_KEPT = frozenset((ALL, name) for name in _READ)
_STDERR = "_stderr"

_STANDS_FOR = {
    "accuracy_score": ("acc", "exact_match", "acc_norm", "accuracy", "pass@1", "pass_at_1"),
    "f1_score": ("f1", "f1_score"),
    "perplexity": ("word_perplexity", "perplexity", "token_perplexity", "byte_perplexity"),
}
"""lm-eval's metrics that one of Olive's sub types may mean; the first that the task has is taken. Any other sub type
means the metric of its own name."""


def to_metric_result(report: Report, declared: Iterable[Any] = (), bounds: Iterable[Bound] = ()) -> Any:
    """The report's metrics under `key`, each with its standard error under `<key>_stderr`, without a priority; the
    metrics that have `bounds`; the verdict's exit status; and the declared metrics under their own names.

    Olive prints and keeps these, of a comparison only `_READ`. The report has the rest. `declared` are Olive's `Metric`
    objects. Raises `ConfigError` for one that no metric of the report matches.
    """
    single = single_bounds(bounds, report.metrics, report.comparison.whole_texts() if report.comparison else ())
    bounded = [item for bound in single for item in matching(report.metrics, bound.metric, bound.task, bound.filter)]
    entries = {}
    for item in report.metrics:
        if item.metric not in COMPARISON_NAMES or (item.task, item.metric) in _KEPT or item in bounded:
            holds_none = item.is_of_drawn and item in bounded
            entries[key(item, report)] = _entry(replace(item, value=math.nan) if holds_none else item, -1)
            if item.stderr is not None:
                stderr = replace(item, value=item.stderr, higher_is_better=False)
                entries[f"{key(item, report)}{_STDERR}"] = _entry(stderr, -1)
    broken = tuple(broken_bounds(bounds, report.metrics, report.comparison))
    if (judged := replace(report, broken=broken).verdict) is not None:
        status = Metric("verdict", "status", "none", EXIT_STATUS[judged.status], higher_is_better=False)
        entries[key(status, report)] = _entry(status, -1)
    for metric in declared:
        for sub_type in metric.sub_types:
            value = _matching(metric, sub_type, report)
            if non_finite_requests(report.metrics) or is_open(value, report.metrics):
                value = replace(value, value=math.nan)  # no goal is met by it
            entries[joint_metric_key(metric.name, text_of(sub_type.name))] = _entry(value, sub_type.priority)
    return MetricResult.model_validate(entries)


def broken_in(result: Any, bounds: Iterable[Bound], judge: Callable[..., list[Any]] = broken_bounds) -> list[Any]:
    """As `judge` of `run.bounds`, for a result of `to_metric_result`, whose keys hold less."""
    metrics = []
    for name, entry in result.items():
        if name.endswith(_STDERR):
            continue
        task, _, rest = name.rpartition("-")
        metric, _, filter_name = rest.partition(",")
        metrics.append(Metric(task, metric, filter_name, entry.value, higher_is_better=entry.higher_is_better))
    renamed = (bound.model_copy(update={"filter": bound.filter and bound.filter.replace("-", "_")}) for bound in bounds)
    texts = [item.task for item in metrics if item.metric == "perplexity_ratio" and item.task != ALL]
    return judge(single_bounds(renamed, metrics, texts), metrics)


def key(metric: Metric, report: Report) -> str:
    """`<task>-<metric>`, with `,<filter>` where the task has several filters.

    Olive reads the part after the last "-" as the metric, so that "-" in metric and filter is replaced by "_".
    """
    name = metric.metric
    if has_several_filters(report, metric.task):
        name = f"{name},{metric.filter}"
    return str(joint_metric_key(metric.task, name.replace("-", "_")))


def declared_pairs(metrics: Iterable[Any]) -> list[tuple[str, str]]:
    """Type and name of each of Olive's metrics."""
    return [(text_of(metric.type), metric.name) for metric in metrics]


def _matching(declared: Any, sub_type: Any, report: Report) -> Metric:
    sub_name = text_of(sub_type.name)
    candidates, measured = _meant(declared.name, sub_name, report), DECLARABLE[text_of(declared.type)]
    if not candidates and measured is not None:
        candidates = _meant(measured, sub_name, report)
    if not candidates and report.comparison is None and (name := declared.name.rpartition("/")[2]) in COMPARISON_NAMES:
        is_one = name in _ONE_OF_ITSELF  # the reference itself, which is compared with nothing
        return Metric(ALL, name, "none", float(is_one), higher_is_better=bool(sub_type.higher_is_better))
    if len(candidates) != 1:
        missing = measured or declared.name
        problem = "stands for several metrics" if candidates else why_missing(missing)
        raise ConfigError(
            f"the declared metric '{declared.name}' with sub type '{sub_name}' {problem}; name it as "
            f'"<task>" or "<task>/<metric>" or "<task>/<metric>,<filter>": {listed(candidates or report.metrics)}',
            code="unknown_name",
        )
    answer = candidates[0]
    if answer.higher_is_better is None:
        return replace(answer, higher_is_better=bool(sub_type.higher_is_better))
    if answer.higher_is_better != bool(sub_type.higher_is_better):
        raise ContradictionError(
            f"the declared metric '{declared.name}' says higher_is_better = {str(sub_type.higher_is_better).lower()}, "
            f"but of {answer.task}/{answer.metric} {'higher' if answer.higher_is_better else 'lower'} values are better"
        )
    return answer


def _meant(name: str, sub_name: str, report: Report) -> list[Metric]:
    """The metrics that a declared name and sub type mean; exactly one in a valid recipe."""
    of_task = [metric for metric in report.metrics if metric.task == name]
    if not of_task:
        return matching(report.metrics, name)
    for meaning in (*_STANDS_FOR.get(sub_name, ()), sub_name):
        metrics = [metric for metric in of_task if metric.metric == meaning]
        if metrics:
            return metrics
    return of_task if len(of_task) == 1 and sub_name in ("accuracy_score", "avg") else []


def _entry(metric: Metric, priority: int) -> dict[str, Any]:
    value = int(metric.value) if metric.task == SIZE_ON_DISK else metric.value
    return {"value": value, "priority": priority, "higher_is_better": metric.higher_is_better is not False}


def text_of(name: Any) -> str:
    """The text of a name: Olive's enumerations are strings, on Python 3.10 with a `str()` of their own."""
    return str(getattr(name, "value", name))
