"""Metrics of one or several models as cells: scores, costs, and the steps of a chain. Knows no comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from olive_ext.report import numbers
from olive_ext.report.comparison import ALL, NAME
from olive_ext.report.metrics import NAMES, Metric
from olive_ext.report.numbers import NO_VALUE, Measured, number
from olive_ext.report.page import Column, joined_passes
from olive_ext.report.report import Report
from olive_ext.report.view import Table

Z95 = 1.959964
"""Standard errors on either side of a 95 % interval."""

_CHAIN_COSTS = ("size_on_disk", "tokens_per_second", "peak_memory")
_CHAIN_DISTANCES = ("kl_mean", "top1_agreement", "perplexity_ratio")
"""Columns of a chain that stand before those of its tasks; the distances are over all tasks."""


def metric_table(report: Report) -> Table:
    """A row for each metric in the report's order. The numbers of a comparison have their own tables."""
    compared = NAMES if report.comparison is not None else ()
    heads = ("task", "metric", "filter", "value", "± stderr", "better", "n")
    rows = [
        (
            *(metric.task, metric.metric, metric.filter, number(metric.value)),
            "" if metric.stderr is None else number(metric.stderr),
            "higher" if metric.higher_is_better else "lower",
            metric.documents,
        )
        for metric in report.metrics
        if metric.metric not in compared
    ]
    return Table(
        str(report.model.get(NAME) or report.model.get("path", "model")),
        heads,
        rows,
        ("task", "metric", "filter", "better"),
    )


@dataclass(frozen=True)
class ChainStep:
    """A model of a chain of passes: its name, and what was measured of it by column."""

    name: str
    values: dict[str, float]
    documents: dict[str, str] = field(default_factory=dict)
    """For columns of drawn documents, how many of how many they are."""


def chain_steps(reports: Sequence[Report]) -> list[ChainStep]:
    """A step for each report, in order: size in bytes, tokens per second, distances to the reference, and each task's
    first metric. What a report does not have is left out."""
    names = [joined_passes(report, " -> ") or str(report.model.get("path", "model")) for report in reports]
    return [_chain_step(name, list(_chain_metrics(report))) for name, report in zip(names, reports, strict=True)]


def _chain_step(name: str, columns: Sequence[tuple[str, Metric]]) -> ChainStep:
    drawn = {column: metric.documents for column, metric in columns if metric.num_population is not None}
    return ChainStep(name, {column: metric.value for column, metric in columns}, drawn)


def _chain_metrics(report: Report) -> Iterator[tuple[str, Metric]]:
    first: dict[str, Metric] = {}
    for metric in report.metrics:
        if metric.metric in _CHAIN_DISTANCES and metric.task == ALL:
            yield metric.metric, metric
        elif metric.task in _CHAIN_COSTS:
            if metric.task != "tokens_per_second" or metric.value > 0:  # a baseline counts no tokens
                yield metric.task, metric
        elif metric.task not in (ALL, "requests_per_second") and metric.metric not in NAMES:
            first.setdefault(metric.task, metric)
    yield from ((f"{metric.task} {metric.metric}", metric) for metric in first.values())


def chain_table(steps: Sequence[ChainStep]) -> Table:
    """A row for each step; the columns that some step has: costs first, then distances, then tasks as they come."""
    seen = dict.fromkeys(name for step in steps for name in step.values)
    known = [name for name in (*_CHAIN_COSTS, *_CHAIN_DISTANCES) if name in seen]
    columns = [*known, *(name for name in seen if name not in known)]
    rows = [[step.name, *(_chain_cell(name, step) for name in columns)] for step in steps]
    return Table("The chain, step by step", ["step", *columns], rows, ("step",))


def _chain_cell(column: str, step: ChainStep) -> str:
    value = step.values.get(column)
    if value is None:
        return ""
    if column == "size_on_disk" and math.isfinite(value):
        return f"{value / 1e6:,.2f} MB"
    shown = f"{value:,.0f}" if column == "tokens_per_second" and math.isfinite(value) else number(value)
    return f"{shown} ({step.documents[column]})" if column in step.documents else shown


@dataclass(frozen=True)
class Bar:
    """A dot with its interval on the row's own axis, in per cent of its width."""

    dot: float
    low: float
    width: float


@dataclass(frozen=True)
class Cell:
    """A model's score."""

    shown: Measured
    change: str = ""
    """Against the baseline, where there is one."""

    bar: Bar | None = None


@dataclass(frozen=True)
class ScoreRow:
    """A metric of a task, a cell for each model."""

    task: str
    metric: str
    filter: str
    higher_is_better: bool
    documents: str
    cells: tuple[Cell, ...]
    is_first: bool
    """Whether the row begins a task."""


def score_rows(columns: Sequence[Column]) -> list[ScoreRow]:
    """A row for each metric of each task; metrics of the comparison and of cost have their own tables."""
    rows: list[ScoreRow] = []
    by_column = [{(item.task, item.metric, item.filter): item for item in column.metrics} for column in columns]
    for key in _keys(columns):
        task, name, filter_name = key
        found = [metrics.get(key) for metrics in by_column]
        known = [metric for metric in found if metric is not None]
        counts = sorted((metric for metric in known if metric.n is not None), key=lambda metric: metric.n or 0)
        row = ScoreRow(
            task,
            name,
            filter="" if filter_name == "none" else filter_name,
            higher_is_better=known[0].higher_is_better,
            documents="/".join(dict.fromkeys(metric.documents for metric in counts)),
            cells=tuple(_cells(found)),
            is_first=not rows or rows[-1].task != task,
        )
        rows.append(row)
    return rows


def _keys(columns: Iterable[Column]) -> list[tuple[str, str, str]]:
    """Task, metric and filter of every row; a task's rows stand together, in the first model's order."""
    keys = dict.fromkeys(
        (metric.task, metric.metric, metric.filter)
        for column in columns
        for metric in column.metrics
        if metric.n is not None and metric.metric not in NAMES
    )
    order = {task: place for place, task in enumerate(dict.fromkeys(key[0] for key in keys))}
    return sorted(keys, key=lambda key: order[key[0]])


def _cells(found: Sequence[Metric | None]) -> Iterator[Cell]:
    """A cell for each model; the first metric is the baseline's. Finite values get bars where one has an interval."""
    ranges = [_range(metric) for metric in found if metric is not None and math.isfinite(metric.value)]
    has_bars = any(low < high for low, high in ranges)
    low, high = min((low for low, _ in ranges), default=0.0), max((high for _, high in ranges), default=0.0)
    room = (high - low or 1.0) * 0.06
    for place, metric in enumerate(found):
        if metric is None:
            yield Cell(Measured(NO_VALUE))
            continue
        difference = metric.value - found[0].value if place and found[0] is not None else math.nan
        yield Cell(
            numbers.with_error(metric.value, metric.stderr),
            _change(difference, metric) if math.isfinite(difference) else "",
            _bar(metric, low - room, high + room) if has_bars and math.isfinite(metric.value) else None,
        )


def _bar(metric: Metric, begin: float, end: float) -> Bar:
    low, high = _range(metric)
    return Bar(*(round(100 * part / (end - begin), 2) for part in (metric.value - begin, low - begin, high - low)))


def _change(difference: float, metric: Metric) -> str:
    """The difference with the decimals of the value itself; in powers of ten where the value is written in those."""
    if abs(metric.value) >= 1e7:
        return numbers.signed_minus(f"{difference:+.1e}") if difference else "0"
    return numbers.plus(difference, numbers.decimals(metric.stderr))


def _range(metric: Metric) -> tuple[float, float]:
    half = Z95 * metric.stderr if metric.stderr is not None and math.isfinite(metric.stderr) else 0.0
    return metric.value - half, metric.value + half


_PHASES = {
    "tasks": "loading the tasks",
    "export": "exporting the float model",
    "load": "opening the models",
    "reference": "the reference",
    "candidate": "the model",
    "statistics": "statistics",
}
"""The phases of an evaluation, in order."""

_LEAST_REST = 0.05
"""Seconds of no phase that are told."""

_COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "size_on_disk": ("Size on disk", numbers.size),
    "tokens_per_second": ("Tokens per second", numbers.count),
    "peak_memory": ("Peak memory", numbers.size),
    "peak_device_memory": ("Peak memory of the device", numbers.size),
    "seconds": ("Time, all of it", numbers.duration),
    **{f"seconds_{name}": (f"of which {words}", numbers.duration) for name, words in _PHASES.items()},
    "tokens_naive": ("Tokens in the requests", numbers.count),
    "tokens_fed": ("of which computed (the rest was shared)", numbers.count),
    "tokens_generated": ("Tokens generated", numbers.count),
}


def cost_rows(columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    """Name and one cell per model, for each cost that is known of at least one of them."""
    known = [_costs(column) for column in columns]
    return [
        (title, [form(costs[key]) if key in costs else NO_VALUE for costs in known])
        for key, (title, form) in _COSTS.items()
        if any(key in costs for costs in known)
    ]


def phases_of(engine: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and seconds of each phase that took any, and of the rest."""
    found = {name: engine[f"seconds_{name}"] for name in _PHASES if engine.get(f"seconds_{name}")}
    yield from found.items()
    if found and (rest := engine["seconds"] - sum(found.values())) >= _LEAST_REST:
        yield "rest", rest


def _costs(column: Column) -> dict[str, float]:
    """The engine's counters, and metrics that do not come from documents."""
    counters: Mapping[str, Any] = column.report.engine if column.report is not None else {}
    costs = {key: float(value) for key, value in counters.items() if isinstance(value, int | float)}
    for metric in column.metrics:
        if metric.n is None and math.isfinite(metric.value):
            costs[metric.task if metric.metric == "bytes" else metric.metric] = metric.value
    return costs
