"""Differences and distances as texts, formatted once for the terminal, markdown and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from olive_ext.report import numbers
from olive_ext.report.changes import difference_texts, perplexity_change
from olive_ext.report.comparison import ALL, Divergence, Outcome
from olive_ext.report.numbers import Measured
from olive_ext.report.page import Contrast
from olive_ext.report.scores import Bar, bars_of, with_filter

Tone = Literal["loss", "gain", "unclear"]
WORDS: dict[Tone, str] = {"loss": "loss", "gain": "gain", "unclear": "no clear difference"}
SIGNS: dict[Tone, str] = {
    "loss": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "gain": "\N{BLACK UP-POINTING TRIANGLE}",
    "unclear": "\N{WHITE CIRCLE}",
}


@dataclass(frozen=True)
class DifferenceRow:
    """An outcome as texts, in percentage points where the metric is a share."""

    candidate: str
    outcome: Outcome
    task: str
    metric: str
    tone: Tone
    shown: str
    interval: str
    reference_score: str
    candidate_score: str
    documents: str
    p: str
    """Empty where documents were drawn."""

    needed: str
    """Documents that resolve a difference of one point, or of another size where that is unknown; may be empty."""

    bar: Bar | None
    """On one axis with all other shares; None of other metrics."""


def difference_rows(contrasts: Iterable[Contrast]) -> list[DifferenceRow]:
    """A row for each outcome, the one over all tasks first, the candidates of one metric together."""
    known = [(each.candidate, each.comparison) for each in contrasts]
    pairs = [(name, outcome) for name, item in known for outcome in (*item.outcomes, *item.lengths)]
    keys = [(outcome.task, outcome.metric, outcome.filter) for _, outcome in pairs]
    order = {key: rank for rank, key in enumerate(dict.fromkeys(keys))}
    pairs.sort(key=lambda item: (item[1].task != ALL, order[item[1].task, item[1].metric, item[1].filter]))
    nothing = (math.nan,) * 3
    points = [(item.difference, item.low, item.high) if item.is_share else nothing for _, item in pairs]
    bars = bars_of(points, with_zero=True)
    return [_difference(*pair, bar) for pair, bar in zip(pairs, bars, strict=True)]


def _difference(candidate: str, outcome: Outcome, bar: Bar | None) -> DifferenceRow:
    score = numbers.percent if outcome.is_share else numbers.nats
    shown, interval = difference_texts(outcome)
    documents = numbers.count(outcome.num_documents)
    if outcome.num_population is not None:
        documents = f"{documents} of {numbers.count(outcome.num_population)}"
    return DifferenceRow(
        candidate=candidate,
        outcome=outcome,
        task=task_title(outcome.task),
        metric=with_filter(outcome.metric, outcome.filter),
        tone=_tone(outcome),
        shown=f"{shown}\N{NO-BREAK SPACE}pt" if outcome.is_share else shown,
        interval=interval,
        reference_score=score(outcome.reference),
        candidate_score=score(outcome.candidate),
        documents=documents,
        p=numbers.probability(outcome.mcnemar_p) if outcome.is_binary and outcome.num_population is None else "",
        needed=_needed(outcome),
        bar=bar,
    )


def _tone(outcome: Outcome) -> Tone:
    if outcome.low <= 0 <= outcome.high:
        return "unclear"
    return "gain" if (outcome.difference > 0) == outcome.higher_is_better else "loss"


def _needed(outcome: Outcome) -> str:
    known = ((key, outcome.documents_needed.get(key)) for key in ("0.01", "0.02", "0.005"))
    return next((f"{numbers.count(item)} for {float(key) * 100:g} pt" for key, item in known if item is not None), "")


@dataclass(frozen=True)
class DivergenceRow:
    """A task's distance between the distributions, as texts."""

    candidate: str
    divergence: Divergence
    task: str
    positions: str
    mean: Measured
    quantiles: tuple[str, ...]
    """Median, 90 %, 99 %, 99.9 %, maximum."""

    agreement: str
    probability_difference: str
    probability_rms: str
    perplexity: Measured | None
    """The change of a whole text's perplexity in per cent; None where targets are answers, wrong ones among them."""

    perplexities: str
    estimate: str
    """The sampling error and the lower bound of a mean estimated from a part of the distributions; empty where the
    mean is exact."""


def divergence_rows(contrasts: Iterable[Contrast]) -> list[DivergenceRow]:
    """A row for each task of each comparison, all tasks together first, the candidates of one task together."""
    rows = []
    for contrast in contrasts:
        comparison = contrast.comparison
        rows += [_divergence(contrast.candidate, item) for item in overall_first(comparison.divergences)]
    order = {task: rank for rank, task in enumerate(dict.fromkeys(row.task for row in rows))}
    return sorted(rows, key=lambda row: order[row.task])


def task_title(task: str) -> str:
    """The task's name for people."""
    return "all tasks" if task == ALL else task


def overall_first(divergences: Sequence[Divergence]) -> list[Divergence]:
    """The divergence over all tasks, then the others; of a single task its own alone, as both are equal."""
    tasks = [item for item in divergences if item.task != ALL]
    return [item for item in divergences if item.task == ALL and len(tasks) != 1] + tasks


def _divergence(candidate: str, item: Divergence) -> DivergenceRow:
    kl, error = item.kl, item.kl_sampling_error
    perplexities = (numbers.nats(item.perplexity_reference), numbers.nats(item.perplexity_candidate))
    estimate = f"estimated \N{PLUS-MINUS SIGN} {numbers.nats(error)}, at least {numbers.nats(item.kl_lower)}"
    return DivergenceRow(
        candidate=candidate,
        divergence=item,
        task=task_title(item.task),
        positions=numbers.count(item.num_positions),
        mean=numbers.nats_with_error(kl.mean, kl.stderr),
        quantiles=tuple(map(numbers.nats, (kl.median, kl.p90, kl.p99, kl.p999, kl.maximum))),
        agreement=numbers.percent(item.top1_agreement, item.top1_agreement_stderr),
        probability_difference=numbers.points(item.top_probability_difference),
        probability_rms=f"{item.top_probability_rms * 100:.2f}",
        perplexity=perplexity_change(item) if item.is_text else None,
        perplexities=" \N{RIGHTWARDS ARROW} ".join(perplexities) if item.is_text else "",
        estimate=estimate if math.isfinite(error) and error > 0 else "",
    )
