"""What changed from reference to candidate, each with the figure that a reader sees and the interval that decides.

Answers come in points, perplexities of whole texts in per cent; more is always better. Knows no verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from olive_ext.errors import counted
from olive_ext.report import numbers
from olive_ext.report.comparison import ALL, Certainty, Comparison, Divergence, Outcome, telling
from olive_ext.report.metrics import read_metrics
from olive_ext.report.numbers import Measured

LEVEL = 0.05
"""Probability of a difference by chance below which one is certain."""

_QUANTILE, _POWER_QUANTILE = (NormalDist().inv_cdf(share) for share in (1 - LEVEL / 2, 0.8))
_LEAST_CHANGE = 0.1
"""The least change of a perplexity, in per cent, that counts: on many texts much less is certain, and matters to
nobody."""


@dataclass(frozen=True)
class Figure:
    """A number as texts: its name, the number, and how sure it is."""

    name: str
    value: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.value}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class Change:
    """Candidate's less reference's of something of which more is better, with the limits that decide."""

    name: str
    unit: str
    estimate: float
    low: float
    high: float
    figure: Figure
    advice: str
    """What would exclude a loss that matters, or why nothing does; empty where that is unknown."""

    is_significant: bool = False
    """Whether its task's exact test finds a change, whatever the interval says."""

    @property
    def is_lost(self) -> bool:
        """Whether a loss is certain."""
        return self.high < 0 or (self.is_significant and self.estimate < 0)

    def may_lose(self, size: float) -> bool:
        """Whether a loss of `size` is not excluded."""
        return not self.low >= -size

    @property
    def is_gained(self) -> bool:
        """Whether a gain is certain."""
        return self.low > 0 or (self.is_significant and self.estimate > 0)

    @property
    def possible_loss(self) -> str:
        """The largest loss within the limits, in words."""
        lost = f"{-self.low:.0f}" if self.low < -99.5 else f"{-self.low:.2g}"
        worst = f"{self.name} may have lost up to {lost} {self.unit}"
        if not math.isfinite(self.low):
            return f"{self.name} is known of one text only"
        return f"{worst} ({self.advice})" if self.advice else worst


def changes_of_answers(comparison: Comparison) -> list[Change]:
    """Of all answers that are right or wrong together; of the first metric of each task without such answers, at the
    level of Bonferroni; and of single metrics whose exact p-value stays below 5 % after Holm's correction."""
    return [change for _, change in changed_outcomes(comparison)]


def changed_outcomes(comparison: Comparison) -> list[tuple[Outcome, Change]]:
    """`changes_of_answers`, each with its outcome."""
    judged, significant = _judged(comparison), _significant(comparison)
    wider = NormalDist().inv_cdf(1 - LEVEL / 2 / max(1, len(judged))) / _QUANTILE
    changes = [(item, _of_answers(item, comparison, wider, item in significant)) for item in judged]
    changes += [(item, _of_answers(item, comparison, 1.0, True)) for item in significant if item not in judged]
    return [(item, _with_unanswered(change, comparison)) for item, change in changes]


def changes_of_texts(comparison: Comparison) -> list[Change]:
    """Of the perplexities of tasks that score whole texts; elsewhere the targets are answers, wrong ones among them."""
    return [_with_unanswered(_of_text(item, comparison.matters), comparison) for item in _texts(comparison)]


def _texts(comparison: Comparison) -> list[Divergence]:
    answered = {ALL, *(item.task for item in comparison.outcomes)}
    return [item for item in comparison.divergences if item.is_text and item.task not in answered]


def unpaired(comparison: Comparison) -> dict[str, str]:
    """Names of the evaluated tasks that nothing judges, with their metrics: no texts, and no metric is a mean over
    documents (MCC, F1 over a corpus, BLEU, chrF), or no document has a value in both runs."""
    judged = {ALL, *(item.task for item in comparison.outcomes), *(item.task for item in _texts(comparison))}
    evaluated = [*comparison.metrics.get("configs", {}), *(item.task for item in comparison.divergences)]
    return {task: _with_metrics(task, comparison) for task in evaluated if task not in judged}


def _with_metrics(task: str, comparison: Comparison) -> str:
    metrics = read_metrics(comparison.metrics)
    names = dict.fromkeys(item.metric for item in metrics if item.task == task)
    return f"{task} ({', '.join(names)})" if names else task


def _with_unanswered(change: Change, comparison: Comparison) -> Change:
    """Documents without an answer, a request each at most, may all be lost: in points of them and the compared ones."""
    if not comparison.missing:
        return change
    everything = comparison.missing + sum(comparison.documents().values())
    advice = f"{counted(comparison.missing, 'request has', 'requests have')} no answer"
    low = change.low - 100 * comparison.missing / everything
    return replace(change, low=max(low, -100.0) if change.unit == "pt" else low, advice=advice)


def difference_texts(item: Outcome) -> tuple[str, str]:
    """The difference and its interval, in points where the metric is a share."""
    half = item.unit * (item.high - item.low) / 4
    places = numbers.decimals(half if half > 0 else None, most=2)
    shown, low, high = (numbers.plus(item.unit * value, places) for value in (item.difference, item.low, item.high))
    return shown, f"{low} to {high}"


def _judged(comparison: Comparison) -> list[Outcome]:
    """The outcome over all tasks, or of each task the one that speaks for it (`telling`), else its first one. Where a
    document has several answers it is their mean (`avg@n`), not the first one's value."""
    averaged = {item.task: item for item in reversed(comparison.outcomes) if item.metric.startswith("avg@")}
    outcomes = [
        item for item in comparison.outcomes if item.task not in averaged and not (averaged and item.task == ALL)
    ]
    firsts = {item.task: item for item in reversed(outcomes) if item.is_binary}
    binary = telling(outcomes)
    others = {item.task: item for item in reversed(outcomes) if item.task not in firsts} | averaged
    if ALL in binary:
        binary = {task: item for task, item in binary.items() if task == ALL or item is not firsts[task]}
    return [*binary.values(), *list(others.values())[::-1]]


def _significant(comparison: Comparison) -> list[Outcome]:
    """Outcomes with p below 5 % by Holm's step-down procedure: every metric and filter, because a task's first may be
    one by which neither model answers rightly (GSM8K's strict match; DROP's beside its F1). Of drawn documents each
    task's first alone: what decided when to stop tells of the others, too."""
    outcomes = [item for item in comparison.outcomes if item.task != ALL]
    firsts = {item.task: item for item in reversed(outcomes)} | telling(outcomes)
    claimed = None if comparison.certainty is None else comparison.certainty.outcome
    tested = [item for item in outcomes if item.num_population is None or item is firsts[item.task]]
    values = [(_p(item, claimed), item) for item in tested]
    kept: list[Outcome] = []
    for rank, (p, item) in enumerate(sorted(values, key=lambda value: value[0])):
        if p * (len(values) - rank) >= LEVEL:
            break
        kept.append(item)
    return kept


def _p(item: Outcome, claimed: tuple[str, str, str] | None) -> float:
    """The exact p-value; of drawn documents, which are not drawn alike, and of values that are no 0 or 1, by a normal
    interval that reaches as far towards zero as theirs. That of a claim is none, and decides by itself."""
    if item.num_population is None and item.is_binary:
        return item.mcnemar_p
    half = item.high - item.difference if item.difference < 0 else item.difference - item.low
    if claimed == (item.task, item.metric, item.filter) or not half > 0:
        return 1.0
    return 2 * NormalDist().cdf(-_QUANTILE * abs(item.difference) / half)


def _of_answers(item: Outcome, comparison: Comparison, wider: float, is_significant: bool) -> Change:
    """The figure shows the outcome's own 95 % interval; the one that decides is `wider` times that."""
    sign = item.unit if item.higher_is_better else -item.unit
    estimate, (low, high) = sign * item.difference, sorted((sign * item.low, sign * item.high))
    name = "accuracy" if item.task == ALL else f"{item.task} {item.metric}"
    if sum((other.task, other.metric) == (item.task, item.metric) for other in comparison.outcomes) > 1:
        name += f" ({item.filter})"
    shown, interval = difference_texts(item)
    return Change(
        name,
        "pt",
        estimate,
        low=estimate + wider * (low - estimate),
        high=estimate + wider * (high - estimate),
        figure=Figure(f"{name} difference", f"{shown}{' pt' * item.is_share}", interval),
        advice=_advice_of_answers(item, comparison.matters / item.unit, comparison.certainty),
        is_significant=is_significant,
    )


def perplexity_change(item: Divergence) -> Measured:
    """The change of the perplexity in per cent with its 95 % margin, as texts; no margin of a single text."""
    stderr = _percent_stderr(item)
    places = numbers.decimals(stderr, most=2)
    margin = f"{_QUANTILE * stderr:.{places}f}" if math.isfinite(stderr) else ""
    return Measured(f"{numbers.plus(100 * (item.perplexity_ratio - 1), places)} %", margin)


def _percent_stderr(item: Divergence) -> float:
    return math.inf if item.perplexity_ratio_stderr is None else 100 * item.perplexity_ratio_stderr


def _of_text(item: Divergence, matters: float) -> Change:
    change, documents, stderr = 100 * (item.perplexity_ratio - 1), item.num_documents, _percent_stderr(item)
    margin, shown = _QUANTILE * stderr, perplexity_change(item)
    name, is_known = f"{item.task} perplexity", math.isfinite(stderr)
    needed = documents * ((_QUANTILE + _POWER_QUANTILE) * stderr / matters) ** 2 if is_known else None
    reach = max(margin, abs(change)) if abs(change) <= _LEAST_CHANGE else margin
    return Change(
        name,
        "%",
        -change,
        low=-change - reach,
        high=-change + reach,
        figure=Figure(name, shown.value, shown.margin or "one text"),
        advice=_advice(needed, documents),
    )


def _advice_of_answers(item: Outcome, size: float, certainty: Certainty | None) -> str:
    """By `Outcome.documents_needed`; without any flip so many that the exact binomial bound of no flip is `size`. Of a
    claim the bound that would do: all documents have an error of their own."""
    if item.num_population is not None:
        if certainty is None or certainty.outcome != (item.task, item.metric, item.filter):
            return ""
        low = item.low if item.higher_is_better else -item.high
        bound = size - (certainty.low - low)
        return f"a claim within {bound:.2g} would exclude it" if bound > 0 else "all documents would be too few"
    if item.is_binary and not item.right_to_wrong + item.wrong_to_right:
        return _to_evaluate(math.log(LEVEL / 2) / math.log1p(-size))
    return _advice(item.documents_needed.get(f"{size:g}"), item.num_documents)


def _advice(needed: float | None, known: int) -> str:
    """Where no more than the known documents are needed, it is the loss that is near the one that matters."""
    if needed is None:
        return ""
    return _to_evaluate(needed) if needed > known else "near the loss that matters"


def _to_evaluate(needed: float) -> str:
    """The number of documents with two significant digits, upwards."""
    unit = 10 ** max(0, math.floor(math.log10(max(needed, 1))) - 1)
    return f"evaluate {math.ceil(needed / unit) * unit:,} documents or more to know"
