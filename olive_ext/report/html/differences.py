"""Differences between two models as a page shows them: rows of the forest plot and the tables of divergences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from olive_ext.report.comparison import ALL, Divergence, Outcome, Spread
from olive_ext.report.html import numbers as numbers
from olive_ext.report.page import Contrast

Tone = Literal["loss", "gain", "unclear"]
WORDS: dict[Tone, str] = {"loss": "loss", "gain": "gain", "unclear": "no clear difference"}
SIGNS: dict[Tone, str] = {
    "loss": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "gain": "\N{BLACK UP-POINTING TRIANGLE}",
    "unclear": "\N{WHITE CIRCLE}",
}


@dataclass(frozen=True)
class Difference:
    """One row: an outcome in words. The numbers are in percentage points where the metric is a share."""

    candidate: str
    task: str
    is_all: bool
    metric: str
    is_share: bool
    difference: float
    low: float
    high: float
    tone: Tone
    shown: str
    interval: str
    reference_score: str
    candidate_score: str
    right_to_wrong: int
    wrong_to_right: int
    lower_is_better: bool
    documents: str
    p: str
    needed: str


def difference_rows(contrasts: Iterable[Contrast]) -> list[Difference]:
    """A row for each outcome, the one over all tasks first, the candidates of one metric together."""
    found = [(contrast.candidate, outcome) for contrast in contrasts for outcome in contrast.comparison.outcomes]
    order = {key: place for place, key in enumerate(dict.fromkeys(_key(outcome) for _, outcome in found))}
    found.sort(key=lambda item: (item[1].task != ALL, order[_key(item[1])]))
    return [_difference(*item) for item in found]


def _key(outcome: Outcome) -> tuple[str, str, str]:
    return outcome.task, outcome.metric, outcome.filter


def _difference(candidate: str, outcome: Outcome) -> Difference:
    is_share = max(abs(outcome.reference), abs(outcome.candidate)) <= 1
    unit = 100.0 if is_share else 1.0
    difference, low, high = (unit * value for value in (outcome.difference, outcome.low, outcome.high))
    places = numbers.decimals((high - low) / 4 if high > low else None, most=2)
    score = numbers.percent if is_share else numbers.nats
    return Difference(
        candidate=candidate,
        task=task_title(outcome.task),
        is_all=outcome.task == ALL,
        metric=outcome.metric if outcome.filter == "none" else f"{outcome.metric}, {outcome.filter}",
        is_share=is_share,
        difference=difference,
        low=low,
        high=high,
        tone=_tone(outcome),
        shown=numbers.plus(difference, places),
        interval=f"{numbers.plus(low, places)} to {numbers.plus(high, places)}",
        reference_score=score(outcome.reference),
        candidate_score=score(outcome.candidate),
        right_to_wrong=outcome.right_to_wrong,
        wrong_to_right=outcome.wrong_to_right,
        lower_is_better=not outcome.higher_is_better,
        documents=numbers.count(outcome.num_documents),
        p=numbers.probability(outcome.mcnemar_p),
        needed=_needed(outcome),
    )


def _tone(outcome: Outcome) -> Tone:
    if outcome.low <= 0 <= outcome.high:
        return "unclear"
    return "gain" if (outcome.difference > 0) == outcome.higher_is_better else "loss"


def _needed(outcome: Outcome) -> str:
    """Documents that tell apart a difference of one point, the most asked-for one; empty where that is not known."""
    for key in ("0.01", "0.02", "0.005"):
        documents = outcome.documents_needed.get(key)
        if documents is not None:
            return f"{numbers.count(documents)} for {float(key) * 100:g} pt"
    return ""


@dataclass(frozen=True)
class DivergenceRow:
    """A task's distance between the distributions, as texts."""

    candidate: str
    task: str
    is_all: bool
    positions: str
    documents: str
    mean: str
    stderr: str
    median: str
    p90: str
    p99: str
    p999: str
    maximum: str
    agreement: str
    probability_difference: str
    probability_rms: str
    perplexities: str
    ratio: str
    ratio_stderr: str
    estimate: str
    """What is to be said of a mean that was estimated from a part of the distributions; empty where it is exact."""


def divergence_rows(contrasts: Iterable[Contrast]) -> list[DivergenceRow]:
    """A row for each task of each comparison, all tasks together first, the candidates of one task together."""
    found = [
        (contrast.candidate, item) for contrast in contrasts for item in overall_first(contrast.comparison.divergences)
    ]
    order = {task: place for place, task in enumerate(dict.fromkeys(item.task for _, item in found))}
    return [_divergence(*item) for item in sorted(found, key=lambda item: order[item[1].task])]


def task_title(task: str) -> str:
    return "all tasks" if task == ALL else task


def overall_first(divergences: Sequence[Divergence]) -> list[Divergence]:
    """Without the one over all tasks where there is a single task: it says the same twice."""
    tasks = [item for item in divergences if item.task != ALL]
    return [item for item in divergences if item.task == ALL and len(tasks) != 1] + tasks


def _divergence(candidate: str, found: Divergence) -> DivergenceRow:
    spread: Spread = found.kl
    mean, stderr = numbers.nats_with_error(spread.mean, spread.stderr)
    ratio, ratio_stderr = numbers.with_error(found.perplexity_ratio, found.perplexity_ratio_stderr)
    return DivergenceRow(
        candidate=candidate,
        task=task_title(found.task),
        is_all=found.task == ALL,
        positions=numbers.count(found.num_positions),
        documents=numbers.count(found.num_documents),
        mean=mean,
        stderr=stderr,
        median=numbers.nats(spread.median),
        p90=numbers.nats(spread.p90),
        p99=numbers.nats(spread.p99),
        p999=numbers.nats(spread.p999),
        maximum=numbers.nats(spread.maximum),
        agreement=numbers.percent(found.top1_agreement, found.top1_agreement_stderr),
        probability_difference=numbers.points(found.top_probability_difference),
        probability_rms=f"{found.top_probability_rms * 100:.2f}",
        perplexities=f"{numbers.nats(found.perplexity_reference)} \N{RIGHTWARDS ARROW} "
        f"{numbers.nats(found.perplexity_candidate)}",
        ratio=ratio,
        ratio_stderr=ratio_stderr,
        estimate=_estimate(found),
    )


def _estimate(found: Divergence) -> str:
    error = found.kl_sampling_error
    if not math.isfinite(error) or error <= 0:
        return ""
    return f"estimated \N{PLUS-MINUS SIGN} {numbers.nats(error)}, at least {numbers.nats(found.kl_lower)}"
