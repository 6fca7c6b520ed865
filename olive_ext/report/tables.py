"""The one table of a page, and the one of a chain of passes, as cells. Knows no terminal and no markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from olive_ext.report import view
from olive_ext.report.changes import difference_texts, perplexity_change
from olive_ext.report.comparison import ALL
from olive_ext.report.metrics import COMPARISON_NAMES, Metric
from olive_ext.report.numbers import count_of, nats_with_error, number, percent
from olive_ext.report.page import Page, joined_passes
from olive_ext.report.report import Report
from olive_ext.report.view import COSTS, SIGNS, cost_rows, with_filter

_CHAIN_COSTS = ("size_on_disk", "tokens_per_second", "peak_memory")
_CHAIN_DISTANCES = ("kl_mean", "top1_agreement", "perplexity_ratio")
"""Columns of a chain that stand before its tasks' columns; the distances are over all tasks."""

_KL, _TOP, _TEXT = "mean KL, nats ↓", "same top token ↑", "perplexity, change ↓"


@dataclass(frozen=True)
class Table:
    """Cells by row, in the order of `heads`; columns in `texts` hold words, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[str]


def page_table(page: Page, *, is_short: bool = False) -> Table:
    """A row for each paired difference, score, distance and cost, and a column for each model. A short table has no
    distances of single tasks except changes of their perplexity, no reverse KL, and no parts of costs."""
    heads = ("task", "metric", "n", *(column.name for column in page.columns))
    distances, costs = [*_distances(page)], cost_rows(page.columns)
    if is_short:
        kept = {(distances[0][0], _KL), (distances[0][0], _TOP)} if distances else set()
        distances = [row for row in distances if row[1] == _TEXT or (row[0], row[1]) in kept]
        costs = [row for row in costs if not row[0].startswith(("of which", "Tokens computed"))]
    rows = [*_differences(page), *_scores(page), *distances, *_counts(page)]
    rows += [("", name, "", *cells) for name, cells in costs]
    return Table(page.title, heads, rows, heads[:2])


def _scores(page: Page) -> Iterator[Sequence[str]]:
    for row in view.scores(page.columns):
        first, baseline = view.known(row)[0], row[0][0]
        changes = [view.change(metric, baseline, page.compared) for metric, _ in row]
        values = [str(view.shown(metric)) for metric, _ in row]
        cells = [f"{value} ({change})" if change else value for value, change in zip(values, changes, strict=True)]
        metric = f"{with_filter(first.metric, first.filter)} {view.ARROWS[first.higher_is_better]}"
        yield first.task, metric.rstrip(), view.score_documents(row), *cells


def _differences(page: Page) -> Iterator[Sequence[str]]:
    for group in view.differences(page.compared):
        cells, outcome = {}, group[0][1]
        for candidate, outcome, _ in group:
            shown, interval = difference_texts(outcome)
            unit = f"\N{NO-BREAK SPACE}{outcome.unit_name}"
            flips = f"lost {outcome.right_to_wrong}, won {outcome.wrong_to_right}" if outcome.is_binary else ""
            p = view.flips_p(outcome)
            parts = [f"{SIGNS[view.tone(outcome)]} {shown}{unit} ({interval})", flips, f"p {p}" if p else ""]
            cells[candidate] = ", ".join(filter(None, parts))
        metric = f"{with_filter(outcome.metric, outcome.filter)}, difference (95 %)"
        texts = (cells.get(item.name, "") for item in page.columns)
        yield view.task_title(outcome.task), metric, count_of(outcome.num_documents, outcome.num_population), *texts


def _distances(page: Page) -> Iterator[Sequence[str]]:
    for group in view.divergences(page.compared):
        task = view.task_title(group[0][1].task)
        lines = {
            _KL: {
                name: f"{nats_with_error(item.kl.mean, item.kl.stderr)}{f' ({about})' if about else ''}"
                for name, item, about in ((name, item, view.estimate(item)) for name, item in group)
            },
            "reverse KL, nats ↓": {
                name: str(nats_with_error(item.kl_reverse, item.kl_reverse_stderr))
                for name, item in group
                if item.kl_reverse is not None
            },
            _TOP: {name: percent(item.top1_agreement, item.top1_agreement_stderr) for name, item in group},
            _TEXT: {
                name: f"{SIGNS[view.perplexity_tone(item)]} {perplexity_change(item)}"
                for name, item in group
                if item.is_text
            },
        }
        for line, cells in lines.items():
            if cells:
                yield task, line, "", *(cells.get(column.name, "") for column in page.columns)


def _counts(page: Page) -> Iterator[Sequence[str]]:
    compared = COMPARISON_NAMES if page.compared else ()
    metrics = [
        {(item.task, item.metric): item for item in column.metrics if item.n is None and item.metric not in compared}
        for column in page.columns
    ]
    for key in dict.fromkeys(key for own in metrics for key in own if not {*key} & COSTS.keys()):
        cells = (number(own[key].value) if key in own else "" for own in metrics)
        yield *key, "", *cells


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
    steps = []
    for name, columns in zip(names, (dict(_chain_metrics(report)) for report in reports), strict=True):
        drawn = {column: metric.documents for column, metric in columns.items() if metric.num_population is not None}
        steps.append(ChainStep(name, {column: metric.value for column, metric in columns.items()}, drawn))
    return steps


def _chain_metrics(report: Report) -> Iterator[tuple[str, Metric]]:
    first: dict[str, Metric] = {}
    for metric in report.metrics:
        if metric.metric in _CHAIN_DISTANCES and metric.task == ALL:
            yield metric.metric, metric
        elif metric.task in _CHAIN_COSTS:
            if metric.task != "tokens_per_second" or metric.value > 0:  # a baseline counts no tokens
                yield metric.task, metric
        elif metric.task not in (ALL, "requests_per_second") and metric.metric not in COMPARISON_NAMES:
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
