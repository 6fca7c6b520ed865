"""Whether a model keeps the bounds that a recipe requires. Pure; knows no model."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from olive_ext.config import Bound
from olive_ext.errors import ConfigError
from olive_ext.report import Metric
from olive_ext.report.compared_metrics import NAMES
from olive_ext.report.comparison import ALL
from olive_ext.report.render import number
from olive_ext.report.select import listed, long_names, matching
from olive_ext.run.costs import PEAK_MEMORY, REQUESTS_PER_SECOND, SIZE_ON_DISK, TOKENS_PER_SECOND, why_missing


def broken_bounds(bounds: Iterable[Bound], metrics: Sequence[Metric]) -> list[str]:
    """A line for each bound that is broken, in their order; a value that is no number breaks every bound.

    Raises `ConfigError` with the metrics there are for a bound that names none of them, or several.
    """
    return [line for bound in bounds for line in _lines(bound, _named(bound, metrics))]


def cost_metrics_of(tasks: Collection[Any]) -> dict[str, Collection[str]]:
    """The metrics of what is measured beside lm-eval's tasks, as far as `tasks` ask for it."""
    speeds = [TOKENS_PER_SECOND, REQUESTS_PER_SECOND] if TOKENS_PER_SECOND in tasks else []
    sizes = [name for name in (SIZE_ON_DISK, PEAK_MEMORY) if name in tasks]
    return {**dict.fromkeys(sizes, ("bytes",)), **{name: (name,) for name in speeds}}


def check_names(
    names: Iterable[tuple[str | None, str]],
    tasks: Mapping[str, Collection[str] | None],
    compared: Collection[str],
    where: str,
) -> None:
    """Raises `ConfigError` for a (task, metric) that no report will have; told before anything is measured.

    `tasks` are those that will be run, each with its metrics or None where they are not known yet; `compared` are the
    metrics of a comparison with a reference, none where there is no reference. `where` is the key that has the names.
    """
    known = {task: None if metrics is None else {*metrics, *compared} for task, metrics in tasks.items()}
    if compared:
        known[ALL] = set(compared)
    for task, name in names:
        if task is not None and task not in known:
            raise ConfigError(f"'{where}': no task '{task}' is measured{_near(task, known)}")
        asked = known if task is None else {task: known[task]}
        there = {metric for metrics in asked.values() for metric in metrics or ()}
        if task is None:
            there |= {*known, *(f"{key}/{metric}" for key, metrics in known.items() for metric in metrics or ())}
        if name.partition(",")[0] not in there and None not in asked.values():
            hint = ": it needs 'reference'" if name.rpartition("/")[2] in NAMES and not compared else _near(name, there)
            raise ConfigError(f"'{where}': no metric '{name}'{f' of task {task!r}' if task else ''} is measured{hint}")


def _near(name: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1)
    return f": did you mean '{near[0]}'?" if near else f"; there are {', '.join(names)}"


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
