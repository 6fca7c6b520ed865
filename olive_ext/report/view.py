"""Scores, differences, distances and costs of one or several models as cells and sentences, in the order in which every
form shows them. Templates and tables lay them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from olive_ext.errors import listed
from olive_ext.report import numbers
from olive_ext.report.changes import perplexity_interval
from olive_ext.report.comparison import ALL, Divergence, Outcome
from olive_ext.report.metrics import COMPARISON_NAMES, STOPPED, Metric
from olive_ext.report.numbers import NO_VALUE, Z95, FormattedValue
from olive_ext.report.page import Column, ComparedModels

_MOST_NAMED = 12
"""Documents whose numbers are printed; the page lists all."""


@dataclass(frozen=True)
class Bar:
    """A dot with its interval on an axis, in per cent of the axis' width; `zero` is where zero is marked."""

    dot: float
    low: float
    width: float
    zero: float | None = None


def bars_of(points: Sequence[tuple[float, float, float]], *, with_zero: bool = False) -> list[Bar | None]:
    """A bar for each (value, low, high), all on one axis; none if not finite, or where no interval has a width."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    if not any(low < high for _, low, high in finite):
        return [None] * len(points)
    ends = [end for _, low, high in finite for end in (low, high)] + [0.0] * with_zero
    room = (max(ends) - min(ends)) * 0.06
    begin, span = min(ends) - room, max(ends) - min(ends) + 2 * room

    def at(value: float) -> float:
        return round(100 * (value - begin) / span, 2)

    return [
        Bar(at(value), at(low), round(100 * (high - low) / span, 2), at(0.0) if with_zero else None)
        if (value, low, high) in finite
        else None
        for value, low, high in points
    ]


Score = tuple[Metric | None, Bar | None]
"""A model's metric, and its bar on the row's own axis."""


def scores(columns: Sequence[Column]) -> list[list[Score]]:
    """A row for each metric of each task, a score for each model; a comparison's metrics and costs have their own
    tables."""
    by_column = [{item.key: item for item in column.metrics} for column in columns]
    rows = [[own.get(key) for own in by_column] for key in _score_keys(columns)]
    return [list(zip(row, bars_of([*map(_interval, row)]), strict=True)) for row in rows]


def known(row: Sequence[Score]) -> list[Metric]:
    """The metrics of a row, for the models that have one."""
    return [metric for metric, _ in row if metric is not None]


def score_documents(row: Sequence[Score]) -> str:
    """The numbers of documents, each once."""
    counted = sorted((metric for metric in known(row) if metric.n is not None), key=lambda metric: metric.n or 0)
    return "/".join(dict.fromkeys(metric.documents for metric in counted))


def shown(metric: Metric | None) -> FormattedValue:
    """The value with its standard error."""
    return FormattedValue(NO_VALUE) if metric is None else numbers.with_error(metric.value, metric.stderr)


def change(metric: Metric | None, baseline: Metric | None, compared: Iterable[ComparedModels] = ()) -> str:
    """The difference from the baseline's, which is the row's first, with the decimals of the value itself; in powers of
    ten where the value is written in those. Empty where there is none, and where `compared` have one in points."""
    difference = math.nan if metric is None or baseline is None else metric.value - baseline.value
    if metric is None or metric is baseline or not math.isfinite(difference):
        return ""
    paired = [item for each in compared for item in each.comparison.outcomes if item.is_share]
    if any(metric.key == item.key for item in paired):
        return ""
    if abs(metric.value) >= 1e7:
        return numbers.signed_minus(f"{difference:+.1e}") if difference else "0"
    return numbers.plus(difference, numbers.decimals(metric.stderr))


def with_filter(metric: str, filter_name: str) -> str:
    """The metric's name, with its filter where the task has one."""
    return metric if filter_name == "none" else f"{metric}, {filter_name}"


def _score_keys(columns: Iterable[Column]) -> list[tuple[str, str, str]]:
    """Task, metric and filter of every row; a task's rows stand together, in the first model's order."""
    keys = dict.fromkeys(
        metric.key
        for column in columns
        for metric in column.metrics
        if metric.n is not None and metric.metric not in COMPARISON_NAMES
    )
    order = {task: rank for rank, task in enumerate(dict.fromkeys(key[0] for key in keys))}
    return sorted(keys, key=lambda key: order[key[0]])


def _interval(metric: Metric | None) -> tuple[float, float, float]:
    value, stderr = (math.nan, None) if metric is None else (metric.value, metric.stderr)
    half = Z95 * stderr if stderr is not None and math.isfinite(stderr) else 0.0
    return value, value - half, value + half


PHASES = {
    "tasks": "loading the tasks",
    "export": "exporting the float model",
    "load": "opening the models",
    "reference": "the reference",
    "candidate": "the model",
    "statistics": "statistics",
}
"""The phases of an evaluation, in order, and what is done in each."""

COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "size_on_disk": ("Size on disk", numbers.size),
    "tokens_per_second": ("Tokens per second", numbers.count),
    "peak_memory": ("Peak memory", numbers.size),
    "peak_device_memory": ("Peak memory of the device", numbers.size),
    "seconds": ("Time, all of it", numbers.duration),
    **{f"seconds_{name}": (f"of which {words}", numbers.duration) for name, words in PHASES.items()},
    "tokens_naive": ("Tokens in the requests", numbers.count),
    "tokens_fed": ("Tokens computed (prompts and answers)", numbers.count),
    "tokens_generated": ("Tokens generated", numbers.count),
}
"""Titles and forms of the costs, by their names."""


def cost_rows(columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    """Name and one cell per model, for each cost that is known of at least one of them. Beside other reports one that
    took answers from an earlier run has no time and no tokens: its own are of the rest alone."""
    known = [costs_of(column) for column in columns]
    if sum(column.report is not None for column in columns) > 1:
        for column, costs in zip(columns, known, strict=True):
            if column.report is not None and (column.report.model.get("journal") or {}).get("answers_used"):
                for key in [key for key in costs if key.startswith(("seconds", "tokens"))]:
                    del costs[key]
    return [
        (title, [form(costs[key]) if key in costs else NO_VALUE for costs in known])
        for key, (title, form) in COSTS.items()
        if any(key in costs for costs in known)
    ]


def costs_of(column: Column) -> dict[str, float]:
    """A model's costs by their names, "size_on_disk" as measured or as known."""
    counters: Mapping[str, Any] = column.report.engine if column.report is not None else {}
    costs = {key: float(value) for key, value in counters.items() if isinstance(value, int | float)}
    if column.size is not None:
        costs["size_on_disk"] = column.size
    for metric in column.metrics:
        if metric.n is None and math.isfinite(metric.value):
            costs[metric.task if metric.metric == "bytes" else metric.metric] = metric.value
    return costs


Tone = Literal["loss", "gain", "unclear"]
WORDS: dict[Tone, str] = {"loss": "loss", "gain": "gain", "unclear": "no clear difference"}
SIGNS: dict[Tone, str] = {
    "loss": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "gain": "\N{BLACK UP-POINTING TRIANGLE}",
    "unclear": "\N{WHITE CIRCLE}",
}


def differences(compared: Iterable[ComparedModels]) -> list[list[tuple[str, Outcome, Bar | None]]]:
    """The outcomes by metric, those over all tasks first; of each metric every candidate with its outcome, and a bar on
    one axis with all other shares; None of other metrics."""
    pairs = [
        (each.candidate, outcome)
        for each in compared
        for outcome in (*each.comparison.outcomes, *each.comparison.lengths)
        if outcome.metric != STOPPED  # neither a loss nor a gain: the verdict says where it is many
    ]
    order = {key: rank for rank, key in enumerate(dict.fromkeys(outcome.key for _, outcome in pairs))}
    pairs.sort(key=lambda pair: (pair[1].task != ALL, order[pair[1].key]))
    nothing = (math.nan,) * 3
    points = [(item.difference, item.low, item.high) if item.is_share else nothing for _, item in pairs]
    rows = [(*pair, bar) for pair, bar in zip(pairs, bars_of(points, with_zero=True), strict=True)]
    return [list(group) for _, group in groupby(rows, lambda row: row[1].key)]


ARROWS = {True: "\N{UPWARDS ARROW}", False: "\N{DOWNWARDS ARROW}", None: ""}
"""By whether a higher value is better; None where nothing says it."""


def tone(item: Outcome | Divergence) -> Tone:
    """Whether the difference, or the change of the perplexity, is one, and of which kind."""
    if isinstance(item, Outcome):
        change, low, high, is_better = item.difference, item.low, item.high, item.higher_is_better
    else:
        (change, low, high), is_better = perplexity_interval(item), False
    return "unclear" if low <= 0 <= high or is_better is None else "gain" if (change > 0) == is_better else "loss"


def flips_p(outcome: Outcome) -> str:
    """McNemar's p; empty where documents were drawn, and where no answer is right or wrong."""
    shown = "< 0.001" if outcome.mcnemar_p < 0.001 else f"{outcome.mcnemar_p:.3f}"
    return shown if outcome.is_binary and outcome.num_population is None else ""


def needed(outcome: Outcome, matters: float) -> str:
    """The documents that resolve a difference that matters, or another size where that is unknown; may be empty."""
    sizes = (f"{matters / 100:g}", "0.01", "0.02", "0.005") if outcome.is_share else ()
    known = ((key, outcome.documents_needed.get(key)) for key in sizes)
    return next((f"{numbers.count(item)} for {float(key) * 100:g} pt" for key, item in known if item is not None), "")


def changed_documents(models: ComparedModels) -> Iterator[str]:
    """A line for each task: the numbers of the documents that the candidate lost and won, of many the first."""
    for task, each in groupby(models.comparison.flips, lambda flip: flip.task):
        flips, texts = [*each], []
        for word, direction in (("lost", "right_to_wrong"), ("won", "wrong_to_right")):
            if own := [str(flip.doc_id) for flip in flips if flip.direction == direction]:
                texts.append(f"{word} {listed(own, _MOST_NAMED)}")
        yield f"documents of {task} by number: {'; '.join(texts)}"


def divergences(compared: Iterable[ComparedModels]) -> list[list[tuple[str, Divergence]]]:
    """The distances by task, all tasks together first; of a single task its own alone, as both are equal. Of each task
    every candidate's."""
    rows: list[tuple[str, Divergence]] = []
    for each in compared:
        of_tasks = [item for item in each.comparison.divergences if item.task != ALL]
        overall = [item for item in each.comparison.divergences if item.task == ALL and len(of_tasks) != 1]
        rows += [(each.candidate, item) for item in (*overall, *of_tasks)]
    tasks = dict.fromkeys(item.task for _, item in rows)
    return [[row for row in rows if row[1].task == task] for task in tasks]


def estimate(item: Divergence) -> str:
    """Sampling error and lower bound of a mean that is estimated from parts of distributions; empty if it is exact."""
    error = item.kl_sampling_error
    text = f"estimated \N{PLUS-MINUS SIGN} {numbers.nats(error)}, at least {numbers.nats(item.kl_lower)}"
    return text if math.isfinite(error) and error > 0 else ""


def task_title(task: str) -> str:
    """The task's name for people."""
    return "all tasks" if task == ALL else task
