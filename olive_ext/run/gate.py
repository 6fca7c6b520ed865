"""Whether a model keeps the bounds that a recipe requires. Pure; knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from olive_ext.config import Bound
from olive_ext.errors import ConfigError
from olive_ext.report import Metric
from olive_ext.report.metrics import listed, long_names, matching
from olive_ext.report.numbers import number
from olive_ext.run.costs import why_missing


def broken_bounds(bounds: Iterable[Bound], metrics: Sequence[Metric]) -> list[str]:
    """A line for each bound that is broken, in their order; a value that is no number breaks every bound.

    Raises `ConfigError` with the metrics there are for a bound that names none of them, or several.
    """
    return [line for bound in bounds for line in _lines(bound, _named(bound, metrics))]


def _named(bound: Bound, metrics: Sequence[Metric]) -> Metric:
    found = matching(metrics, bound.metric, bound.task, bound.filter)
    if len(found) == 1:
        return found[0]
    problem = "stands for several metrics" if found else why_missing(bound.task or bound.metric)
    raise ConfigError(f"'require': {written(bound)} {problem}: {listed(found or metrics)}")


def written(bound: Bound) -> str:
    """What the bound is on, in the recipe's own words."""
    task, name = f" of task '{bound.task}'" if bound.task else "", f", filter '{bound.filter}'" if bound.filter else ""
    return f"'{bound.metric}'{task}{name}"


def _lines(bound: Bound, metric: Metric) -> Iterable[str]:
    short, long = long_names(metric)
    name = long if bound.filter else short
    if bound.max is not None and not metric.value <= bound.max:
        yield f"{name} = {number(metric.value)}, required at most {number(bound.max)}"
    if bound.min is not None and not metric.value >= bound.min:
        yield f"{name} = {number(metric.value)}, required at least {number(bound.min)}"
