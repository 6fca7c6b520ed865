"""The changes from reference to candidate, each with the figure that a reader sees and the interval that decides.

Answers come in points, perplexities of whole texts in per cent; more is always better. Knows no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

from olive_ext.errors import counted
from olive_ext.report import numbers
from olive_ext.report.comparison import (
    ACCURACY,
    ALL,
    LEAST_TEXTS,
    PERPLEXITY,
    ClaimResult,
    Comparison,
    Divergence,
    Outcome,
    TextChange,
    primary_outcomes,
)
from olive_ext.report.metrics import CUT_OFF
from olive_ext.report.numbers import FormattedValue

LEVEL = 0.05
"""Probability of a difference by chance below which one is certain."""

OVER_ALL = f"a verdict finds a loss of equal models in at most {100 * LEVEL:g} %, over all tasks and metrics"
_QUANTILE, _POWER_QUANTILE = (NormalDist().inv_cdf(share) for share in (1 - LEVEL / 2, 0.8))
_LEAST_CHANGE = 0.1
"""The least change of a perplexity, in per cent, that counts: much less is certain on many documents, and on few whose
values all move the same way, and matters to nobody."""


class Figure(NamedTuple):
    """A number as texts: its name, the number, and how sure it is."""

    name: str
    value: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.value}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class Change:
    """The candidate's value minus the reference's, where more is better, with its 95 % interval."""

    task: str
    metric: str
    """With the filter where the task has several of this metric."""

    unit: str
    estimate: float
    low: float
    high: float
    p: float
    """Two-sided, of no change."""

    figure: Figure
    advice: str
    """The documents or the bound that would exclude a loss that matters, or why nothing can; may be empty."""

    documents: int | None = None
    """Those documents; None where they are not known, or no more are needed."""

    outcome: Outcome | None = None
    """None for a perplexity. Where nothing says whether more of it is better, the change is the worse of both senses.
    """

    is_certain: bool = False
    """Whether the change is significant after the correction for the number of changes."""

    is_shown: bool = True
    """Whether a verdict shows its figure without any finding."""

    is_whole: bool = False
    """Whether it stands for all answers: over all tasks, or the first metric of a single task."""

    @property
    def name(self) -> str:
        """The name of the task and its metric."""
        return name_of(self.task, self.metric)

    @property
    def is_unclear(self) -> bool:
        """Whether a change is certain, and nothing says if it is a loss or a gain."""
        return self.is_certain and self.outcome is not None and self.outcome.higher_is_better is None

    @property
    def is_lost(self) -> bool:
        """Whether a loss is certain."""
        return self.is_certain and self.estimate < 0 and not self.is_unclear

    @property
    def is_gained(self) -> bool:
        """Whether a gain is certain."""
        return self.is_certain and self.estimate > 0

    def may_lose(self, size: float) -> bool:
        """Whether a loss of `size` is not excluded."""
        return not self.low >= -size


def name_of(task: str, metric: str) -> str:
    """A metric of a task for people."""
    return ACCURACY if task == ALL else f"{task} {metric}".rstrip()


def changes_of(comparison: Comparison) -> list[Change]:
    """Every metric of every task, all answers together, whole texts' perplexities, and shares of answers cut off.

    A change is certain if its p-value is significant after correction: for the change over all answers (or of the
    single task with right and wrong answers) below 5 %, for all others below 5 % by Holm's step-down procedure (1979)
    for their number. A loss is one of two signs, so at most 2.5 % + 2.5 % of equal models are called a loss.
    """
    leading = comparison.overall_outcome()
    lengths = [item for item in comparison.lengths if item.metric == CUT_OFF]
    ranked = sorted(comparison.outcomes, key=lambda item: item.task != ALL)
    outcomes = [(item, _of_answers(item, comparison)) for item in (*ranked, *lengths)]
    texts = [_of_text(item, comparison.matters) for item in comparison.perplexities().values()]
    is_single = len({(item.task, item.metric.startswith("avg@")) for item in comparison.outcomes}) == 1
    first = [change for item, change in outcomes if item is leading and item.is_binary]
    others = [change for _, change in outcomes if change not in first] + texts
    certain = [change for change in first if change.p < LEVEL]
    for rank, change in enumerate(sorted(others, key=lambda change: change.p)):
        if not change.p * (len(others) - rank) < LEVEL:
            break
        certain.append(change)
    changes = [*(change for _, change in outcomes), *texts]
    whole = [change for item, change in outcomes if item is leading and (item.task == ALL or is_single)]
    settled = (replace(item, is_certain=item in certain, is_whole=item in whole) for item in changes)
    return [_with_unanswered(item, comparison) for item in settled]


def deciding_changes(changes: Sequence[Change]) -> list[Change]:
    """The changes in which a loss that matters must be excluded. Left out are lengths that did not clearly change, and,
    where a document has several answers, the first answers' metric, which `avg@n` is the mean of, and all answers
    together, which are first ones."""
    averaged = {(item.task, item.outcome.filter) for item in changes if item.outcome and item.metric.startswith("avg@")}
    superseded = {(ALL, "none")} if averaged else set()
    kept = []
    for item in changes:
        key = (item.task, item.outcome.filter) if item.outcome is not None else None
        if key in averaged:
            averaged.remove(key)
        elif key not in superseded and (item.metric != CUT_OFF or (item.p < LEVEL and item.estimate < 0)):
            kept.append(item)
    return kept


def _with_unanswered(change: Change, comparison: Comparison) -> Change:
    """Documents without an answer, a request each at most, may all be lost, and all be of this task: in points of them
    and the compared ones. A text without one may have lost anything."""
    if not comparison.missing:
        return change
    known = comparison.documents().get(change.task, 0) if change.outcome is None else change.outcome.num_documents
    everything = comparison.missing + known
    low = change.low - 100 * comparison.missing / everything
    return replace(change, low=max(low, -100.0) if change.unit == "pt" else -math.inf, advice=comparison.unanswered)


def difference_texts(item: Outcome) -> tuple[str, str]:
    """The difference and its interval, in points, or per cent of the reference (`Outcome.unit`)."""
    half = item.unit * (item.high - item.low) / 4
    places = numbers.decimals(half if half > 0 else None, most=2)
    shown, low, high = (numbers.plus(item.unit * value, places) for value in (item.difference, item.low, item.high))
    return shown, f"{low} to {high}"


def _p(item: Outcome, certainty: ClaimResult | None) -> float:
    """The p-value, which always says what the interval does. Drawn documents, which are not drawn alike, have that of a
    normal interval that reaches as far towards zero; of a claim, which holds whenever it stops, the interval decides.
    """
    if item.num_population is None:
        return item.mcnemar_p
    if certainty is not None and certainty.outcome == item.key:
        return 1.0 if item.low <= 0 <= item.high else 0.0
    half = item.high - item.difference if item.difference < 0 else item.difference - item.low
    return 2 * NormalDist().cdf(-_QUANTILE * abs(item.difference) / half) if half > 0 else 1.0


def _of_answers(item: Outcome, comparison: Comparison) -> Change:
    is_worse = item.difference > 0 if item.higher_is_better is None else not item.higher_is_better
    sign, others = -item.unit if is_worse else item.unit, comparison.outcomes
    low, high = sorted((sign * item.low, sign * item.high))
    low = min(low, -high) if item.higher_is_better is None else low
    is_one_of_several = sum((other.task, other.metric) == (item.task, item.metric) for other in others) > 1
    metric = f"{item.metric} ({item.filter})" if is_one_of_several else item.metric
    shown, interval = difference_texts(item)
    telling_ones = primary_outcomes(others)
    is_first = item is telling_ones.get(item.task, next((other for other in others if other.task == item.task), None))
    is_shown = is_first and (item.task == ALL or not {ALL, item.task} <= telling_ones.keys())
    return Change(
        item.task,
        metric,
        item.unit_name,
        sign * item.difference,
        low,
        high,
        _p(item, comparison.certainty),
        Figure(f"{name_of(item.task, metric)} difference", f"{shown} {item.unit_name}", interval),
        *_advice_of_answers(item, comparison.matters, comparison.certainty),
        outcome=item,
        is_shown=is_shown or item.metric.startswith("avg@"),
    )


def perplexity_change(item: Divergence | TextChange) -> FormattedValue:
    """The change of the perplexity in per cent with its 95 % interval, as texts; none of too few. The interval has both
    its ends where these are not as far from the change: few texts with a long tail."""
    change, low, high = perplexity_interval(item)
    places = numbers.decimals(min(change - low, high - change) / _QUANTILE, most=2)
    below, above = f"{change - low:.{places}f}", f"{high - change:.{places}f}"
    ends = below if below == above else f"{numbers.plus(low, places)} to {numbers.plus(high, places)}"
    return FormattedValue(f"{numbers.plus(change, places)} %", ends if math.isfinite(high - low) else "")


def perplexity_interval(item: Divergence | TextChange) -> tuple[float, float, float]:
    """The change of the perplexity in per cent, and the ends of its 95 % interval."""
    change = item.perplexity_ratio - 1
    low, high = item.interval(change, item.perplexity_ratio_stderr, item.perplexity_ratio_skewness)
    return 100 * change, 100 * low, 100 * high


def _of_text(item: Divergence | TextChange, matters: float) -> Change:
    metric = item.metric if isinstance(item, TextChange) else PERPLEXITY
    (change, low, high), documents, shown = perplexity_interval(item), item.num_documents, perplexity_change(item)
    errors = item.perplexity_ratio_stderr, item.perplexity_ratio_skewness
    reach = (1 + _POWER_QUANTILE / _QUANTILE) * (high - change)
    needed = documents * (reach / matters) ** 2 if math.isfinite(reach) else None
    few = f"{counted(documents, 'text')}, {LEAST_TEXTS} are needed"
    advice, more = (few, LEAST_TEXTS) if needed is None else _advice(needed, documents)
    return Change(
        item.task,
        metric,
        "%",
        -change,
        low=-high,
        high=-low,
        p=1.0 if abs(change) <= _LEAST_CHANGE else item.p(change / 100, *errors),
        figure=Figure(name_of(item.task, metric), shown.value, shown.margin or counted(documents, "text")),
        advice=advice,
        documents=more,
    )


def _advice_of_answers(item: Outcome, matters: float, certainty: ClaimResult | None) -> tuple[str, int | None]:
    """The number of documents by `Outcome.documents_needed`; at least so many that documents without any change would
    exclude the loss. A claim is only about its own documents."""
    if item.num_population is not None:
        is_claimed = certainty is not None and certainty.outcome == item.key
        return "on other documents of these tasks" * is_claimed, None
    size = matters / item.unit
    needed = item.documents_needed.get(f"{size:g}")
    if not item.is_share or not size < 1:
        return _advice(needed, item.num_documents)
    advice, documents = _advice(max(needed or 0, math.log(LEVEL / 2) / math.log1p(-size)), item.num_documents)
    least = item.unit * (1 - (LEVEL / 2) ** (1 / item.num_documents))
    if not least > matters:
        return advice, documents
    return f"{counted(item.num_documents, 'document')} without a flip would exclude {least:.2g} pt; {advice}", documents


def _advice(needed: float | None, known: int) -> tuple[str, int | None]:
    """Where no more than the known documents are needed, it is the loss that is near the one that matters."""
    if needed is None or needed <= known:
        return "" if needed is None else "near the loss that matters", None
    unit = 10 ** max(0, math.floor(math.log10(max(needed, 1))) - 1)  # two significant digits, upwards
    documents = math.ceil(needed / unit) * unit
    if documents > 1_000_000:
        return "a million documents would be too few", documents
    return f"evaluate {documents:,} documents or more to know", documents
