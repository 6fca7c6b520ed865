"""What changed from reference to candidate, each with the figure that a reader sees and the interval that decides.

Answers come in points, perplexities of whole texts in per cent; more is always better. Knows no verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from olive_ext.errors import counted
from olive_ext.report import numbers
from olive_ext.report.comparison import ALL, Certainty, Comparison, Divergence, Outcome

_LEVEL = 0.05
_QUANTILE, _POWER_QUANTILE = (NormalDist().inv_cdf(share) for share in (1 - _LEVEL / 2, 0.8))
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
    needed: str
    """What would exclude a loss that matters, in words; empty where that is unknown."""

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
        return f"{worst} ({self.needed})" if self.needed else worst


def changes_of_answers(comparison: Comparison) -> list[Change]:
    """Of all answers that are right or wrong together; of the first metric of each task without such answers, at the
    level of Bonferroni; and of single tasks whose exact p-value stays below 5 % after Holm's correction."""
    judged, significant = _judged(comparison), _significant(comparison)
    wider = NormalDist().inv_cdf(1 - _LEVEL / 2 / max(1, len(judged))) / _QUANTILE
    found = [_of_answers(item, comparison, wider, item in significant) for item in judged]
    found += [_of_answers(item, comparison, 1.0, True) for item in significant if item not in judged]
    return [_with_unanswered(change, comparison) for change in found]


def changes_of_texts(comparison: Comparison) -> list[Change]:
    """Of the perplexities of tasks that score whole texts; elsewhere the targets are answers, wrong ones among them."""
    answered = {ALL, *(item.task for item in comparison.outcomes)}
    found = [_of_text(item, comparison.matters) for item in comparison.divergences if item.task not in answered]
    return [_with_unanswered(change, comparison) for change in found]


def _with_unanswered(change: Change, comparison: Comparison) -> Change:
    """Documents without an answer, a request each at most, may all be lost: in points of them and the compared ones."""
    if not comparison.missing:
        return change
    everything = comparison.missing + sum(comparison.documents().values())
    needed = f"{counted(comparison.missing, 'request has', 'requests have')} no answer"
    low = change.low - 100 * comparison.missing / everything
    return replace(change, low=max(low, -100.0) if change.unit == "pt" else low, needed=needed)


def difference_texts(item: Outcome) -> tuple[str, str]:
    """The difference and its interval, in points where the metric is a share."""
    half = item.unit * (item.high - item.low) / 4
    places = numbers.decimals(half if half > 0 else None, most=2)
    shown, low, high = (numbers.plus(item.unit * value, places) for value in (item.difference, item.low, item.high))
    return shown, f"{low} to {high}"


def _judged(comparison: Comparison) -> list[Outcome]:
    binary = {item.task: item for item in reversed(comparison.outcomes) if item.is_binary}
    others = {item.task: item for item in reversed(comparison.outcomes) if item.task not in binary}
    overall = [binary[ALL]] if ALL in binary else list(binary.values())[::-1]
    return [*overall, *list(others.values())[::-1]]


def _significant(comparison: Comparison) -> list[Outcome]:
    """Outcomes with p below 5 % by Holm's step-down procedure; each task counts once, by its first right or wrong."""
    firsts = {item.task: item for item in reversed(comparison.outcomes) if item.task != ALL and item.is_binary}
    claimed = None if comparison.certainty is None else comparison.certainty.outcome
    values = [(_p(item, claimed), item) for item in firsts.values()]
    kept: list[Outcome] = []
    for rank, (p, item) in enumerate(sorted(values, key=lambda value: value[0])):
        if p * (len(values) - rank) >= _LEVEL:
            break
        kept.append(item)
    return kept


def _p(item: Outcome, claimed: tuple[str, str, str] | None) -> float:
    """The exact p-value; of drawn documents, which are not drawn alike, by the normal interval of their weighted mean.
    The interval of a claim is none, and decides by itself."""
    if item.num_population is None:
        return item.mcnemar_p
    half = (item.high - item.low) / 2
    if claimed == (item.task, item.metric, item.filter) or not half > 0:
        return 1.0
    return 2 * NormalDist().cdf(-_QUANTILE * abs(item.difference) / half)


def _of_answers(item: Outcome, comparison: Comparison, wider: float, is_significant: bool) -> Change:
    """The figure shows the outcome's own 95 % interval; the one that decides is `wider` times that."""
    sign = item.unit if item.higher_is_better else -item.unit
    estimate, (low, high) = sign * item.difference, sorted((sign * item.low, sign * item.high))
    name = "accuracy" if item.task == ALL else f"{item.task} {item.metric}"
    shown, interval = difference_texts(item)
    return Change(
        name,
        "pt",
        estimate,
        low=estimate + wider * (low - estimate),
        high=estimate + wider * (high - estimate),
        figure=Figure(f"{name} difference", f"{shown}{' pt' * item.is_share}", interval),
        needed=_needed_of_answers(item, comparison.loss_that_matters(item), comparison.certainty),
        is_significant=is_significant,
    )


def _of_text(found: Divergence, matters: float) -> Change:
    change, documents = 100 * (found.perplexity_ratio - 1), found.num_documents
    stderr = math.inf if found.perplexity_ratio_stderr is None else 100 * found.perplexity_ratio_stderr
    margin, places = _QUANTILE * stderr, numbers.decimals(stderr, most=2)
    name, is_known = f"{found.task} perplexity", math.isfinite(stderr)
    note = f"\N{PLUS-MINUS SIGN} {margin:.{places}f}" if is_known else "one text"
    needed = documents * ((_QUANTILE + _POWER_QUANTILE) * stderr / matters) ** 2 if is_known else None
    reach = max(margin, abs(change)) if abs(change) <= _LEAST_CHANGE else margin
    return Change(
        name,
        "%",
        -change,
        low=-change - reach,
        high=-change + reach,
        figure=Figure(name, f"{numbers.plus(change, places)} %", note),
        needed=_needed(needed, documents),
    )


def _needed_of_answers(item: Outcome, size: float, certainty: Certainty | None) -> str:
    """By `Outcome.documents_needed`; without any flip so many that the exact binomial bound of no flip is `size`. Of a
    claim the bound that would do: all documents have an error of their own."""
    if item.num_population is not None:
        if certainty is None or certainty.outcome != (item.task, item.metric, item.filter):
            return ""
        low = item.low if item.higher_is_better else -item.high
        bound = size - (certainty.low - low)
        return f"a claim within {bound:.2g} would exclude it" if bound > 0 else "all documents would be too few"
    if item.is_binary and not item.right_to_wrong + item.wrong_to_right:
        return f"at least {_rounded(math.log(_LEVEL / 2) / math.log1p(-size))} documents would do"
    return _needed(item.documents_needed.get(f"{size:g}"), item.num_documents)


def _needed(needed: float | None, known: int) -> str:
    """Where no more than the known documents are needed, it is the loss that is near the one that matters."""
    if needed is None:
        return ""
    return f"about {_rounded(needed)} documents would do" if needed > known else "near the loss that matters"


def _rounded(value: float) -> str:
    """Two significant digits, upwards."""
    unit = 10 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return f"{math.ceil(value / unit) * unit:,}"
