"""The table of models and tasks, and what a run cost: rows of cells as a template shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from olive_ext.report.html import numbers as numbers
from olive_ext.report.page import Column
from olive_ext.report.report import Metric

Z95 = 1.959964
"""Standard errors on either side of a 95 % interval."""

_NO_VALUE = "\N{EM DASH}"
_OF_COMPARISON = (
    "kl_",
    "top1_agreement",
    "top_probability_",
    "perplexity_ratio",
    "flips_",
    "accuracy_difference",
    "mcnemar_p",
)
"""Beginnings of the names of metrics that a comparison adds; the page has tables of their own for them."""


@dataclass(frozen=True)
class Bar:
    """A dot with its interval on the row's own axis, in per cent of its width."""

    dot: float
    low: float
    width: float


@dataclass(frozen=True)
class Cell:
    value: str
    error: str = ""
    change: str = ""
    """Against the baseline, where there is one."""

    bar: Bar | None = None


@dataclass(frozen=True)
class Row:
    task: str
    metric: str
    filter: str
    direction: str
    documents: str
    cells: tuple[Cell, ...]
    is_first: bool
    """Whether the row begins a task."""


def score_rows(columns: Sequence[Column]) -> list[Row]:
    """A row for each metric of each task; metrics of the comparison and of cost have their own tables."""
    rows: list[Row] = []
    for key in _keys(columns):
        found = [_metric(column, key) for column in columns]
        first = next(metric for metric in found if metric is not None)
        counts = {metric.n for metric in found if metric is not None and metric.n is not None}
        rows.append(
            Row(
                *key[:2],
                filter="" if key[2] == "none" else key[2],
                direction="higher" if first.higher_is_better else "lower",
                documents="/".join(numbers.count(item) for item in sorted(counts)),
                cells=_cells(found),
                is_first=not rows or rows[-1].task != key[0],
            )
        )
    return rows


def _keys(columns: Iterable[Column]) -> list[tuple[str, str, str]]:
    """Task, metric and filter of every row; a task's rows stand together, in the first model's order."""
    keys: dict[tuple[str, str, str], None] = {}
    for column in columns:
        for metric in column.metrics:
            if metric.n is not None and not metric.metric.startswith(_OF_COMPARISON):
                keys[metric.task, metric.metric, metric.filter] = None
    order = {task: place for place, task in enumerate(dict.fromkeys(key[0] for key in keys))}
    return sorted(keys, key=lambda key: order[key[0]])


def _metric(column: Column, key: tuple[str, str, str]) -> Metric | None:
    return next((item for item in column.metrics if (item.task, item.metric, item.filter) == key), None)


def _cells(found: Sequence[Metric | None]) -> tuple[Cell, ...]:
    ranges = [_range(metric) for metric in found if metric is not None and math.isfinite(metric.value)]
    has_bars = any(low < high for low, high in ranges)
    low, high = min((item[0] for item in ranges), default=0.0), max((item[1] for item in ranges), default=1.0)
    room = (high - low or 1.0) * 0.06
    return tuple(
        _cell(metric, found[0] if place else None, (low - room, high + room) if has_bars else None)
        for place, metric in enumerate(found)
    )


def _cell(metric: Metric | None, baseline: Metric | None, axis: tuple[float, float] | None) -> Cell:
    if metric is None:
        return Cell(_NO_VALUE)
    value, error = numbers.with_error(metric.value, metric.stderr)
    change = ""
    if baseline is not None and math.isfinite(metric.value - baseline.value):
        change = _change(metric.value - baseline.value, metric)
    if axis is None or not math.isfinite(metric.value):
        return Cell(value, error, change)
    begin, length = axis[0], axis[1] - axis[0]
    low, high = _range(metric)
    bar = Bar(*(round(100 * part / length, 2) for part in (metric.value - begin, low - begin, high - low)))
    return Cell(value, error, change, bar)


def _change(difference: float, metric: Metric) -> str:
    """With the decimals of the value itself; a value in powers of ten has a change in those."""
    if abs(metric.value) >= 1e7:
        return numbers.signed_minus(f"{difference:+.1e}") if difference else "0"
    return numbers.plus(difference, numbers.decimals(metric.stderr))


def _range(metric: Metric) -> tuple[float, float]:
    half = Z95 * metric.stderr if metric.stderr is not None and math.isfinite(metric.stderr) else 0.0
    return metric.value - half, metric.value + half


_COST: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("size_on_disk", "Size on disk", numbers.size),
    ("tokens_per_second", "Tokens per second", numbers.count),
    ("peak_memory", "Peak memory", numbers.size),
    ("peak_device_memory", "Peak memory of the device", numbers.size),
    ("seconds", "Time, all of it", numbers.duration),
    ("seconds_load", "of which opening the model", numbers.duration),
    ("tokens_naive", "Tokens in the requests", numbers.count),
    ("tokens_fed", "of which computed (the rest was shared)", numbers.count),
    ("tokens_generated", "Tokens generated", numbers.count),
)


def measured(columns: Sequence[Column]) -> list[Column]:
    """Those of which any cost is known."""
    return [column for column in columns if cost_rows([column])]


def cost_rows(columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    """Name and one cell per model, for what is known of at least one of them."""
    known = [_costs(column) for column in columns]
    rows = []
    for key, title, form in _COST:
        values = [facts.get(key) for facts in known]
        if any(value is not None for value in values):
            rows.append((title, [_NO_VALUE if value is None else form(value) for value in values]))
    return rows


def _costs(column: Column) -> dict[str, float]:
    """The engine's counters, and metrics that do not come from documents."""
    counters: Mapping[str, Any] = column.report.engine if column.report is not None else {}
    costs = {key: float(value) for key, value in counters.items() if isinstance(value, int | float)}
    for metric in column.metrics:
        if metric.n is None and math.isfinite(metric.value):
            costs[metric.task if metric.metric == "bytes" else metric.metric] = metric.value
    return costs
