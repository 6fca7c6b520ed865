"""Differences and distances in the order in which every form shows them, and what is said of each in words. Templates
and tables format the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

from olive_ext.report import numbers
from olive_ext.report.comparison import ALL, Divergence, Outcome
from olive_ext.report.page import Contrast
from olive_ext.report.scores import Bar, bars_of

Tone = Literal["loss", "gain", "unclear"]
WORDS: dict[Tone, str] = {"loss": "loss", "gain": "gain", "unclear": "no clear difference"}
SIGNS: dict[Tone, str] = {
    "loss": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "gain": "\N{BLACK UP-POINTING TRIANGLE}",
    "unclear": "\N{WHITE CIRCLE}",
}

Difference = tuple[str, Outcome, Bar | None]
"""A candidate, its outcome, and a bar on one axis with all other shares; None of other metrics."""


def differences(contrasts: Iterable[Contrast]) -> list[list[Difference]]:
    """The outcomes by metric, those over all tasks first; of each metric every candidate's."""
    pairs = [
        (each.candidate, outcome)
        for each in contrasts
        for outcome in (*each.comparison.outcomes, *each.comparison.lengths)
    ]
    order = {key: rank for rank, key in enumerate(dict.fromkeys(_key(outcome) for _, outcome in pairs))}
    pairs.sort(key=lambda pair: (pair[1].task != ALL, order[_key(pair[1])]))
    nothing = (math.nan,) * 3
    points = [(item.difference, item.low, item.high) if item.is_share else nothing for _, item in pairs]
    rows = [(*pair, bar) for pair, bar in zip(pairs, bars_of(points, with_zero=True), strict=True)]
    return [list(group) for _, group in groupby(rows, lambda row: _key(row[1]))]


def _key(outcome: Outcome) -> tuple[str, str, str]:
    return outcome.task, outcome.metric, outcome.filter


def tone(outcome: Outcome) -> Tone:
    """Whether the difference is one, and of which kind."""
    if outcome.low <= 0 <= outcome.high:
        return "unclear"
    return "gain" if (outcome.difference > 0) == outcome.higher_is_better else "loss"


def documents(outcome: Outcome) -> str:
    """How many there were, of how many where they were drawn."""
    known = numbers.count(outcome.num_documents)
    return known if outcome.num_population is None else f"{known} of {numbers.count(outcome.num_population)}"


def flips_p(outcome: Outcome) -> str:
    """McNemar's p; empty where documents were drawn, and where no answer is right or wrong."""
    has_p = outcome.is_binary and outcome.num_population is None
    return numbers.probability(outcome.mcnemar_p) if has_p else ""


def needed(outcome: Outcome) -> str:
    """Documents that resolve a difference of one point, or of another size where that is unknown; may be empty."""
    known = ((key, outcome.documents_needed.get(key)) for key in ("0.01", "0.02", "0.005"))
    return next((f"{numbers.count(item)} for {float(key) * 100:g} pt" for key, item in known if item is not None), "")


def divergences(contrasts: Iterable[Contrast]) -> list[list[tuple[str, Divergence]]]:
    """The distances by task, all tasks together first; of each task every candidate's."""
    rows = [(each.candidate, item) for each in contrasts for item in overall_first(each.comparison.divergences)]
    tasks = dict.fromkeys(item.task for _, item in rows)
    return [[row for row in rows if row[1].task == task] for task in tasks]


def overall_first(divergences: Sequence[Divergence]) -> list[Divergence]:
    """The divergence over all tasks, then the others; of a single task its own alone, as both are equal."""
    tasks = [item for item in divergences if item.task != ALL]
    return [item for item in divergences if item.task == ALL and len(tasks) != 1] + tasks


def estimate(item: Divergence) -> str:
    """The sampling error and the lower bound of a mean estimated from a part of the distributions; empty where the
    mean is exact."""
    error = item.kl_sampling_error
    text = f"estimated \N{PLUS-MINUS SIGN} {numbers.nats(error)}, at least {numbers.nats(item.kl_lower)}"
    return text if math.isfinite(error) and error > 0 else ""


def task_title(task: str) -> str:
    """The task's name for people."""
    return "all tasks" if task == ALL else task
