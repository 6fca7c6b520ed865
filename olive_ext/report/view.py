"""A comparison as cells and sentences, formatted once for the terminal, markdown and HTML. Knows none of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from olive_ext.report import numbers
from olive_ext.report.changes import difference_texts
from olive_ext.report.comparison import ALL, NAME, Comparison, Divergence, Outcome
from olive_ext.report.numbers import Measured
from olive_ext.report.page import Contrast
from olive_ext.report.verdict import verdict

Tone = Literal["loss", "gain", "unclear"]
WORDS: dict[Tone, str] = {"loss": "loss", "gain": "gain", "unclear": "no clear difference"}
SIGNS: dict[Tone, str] = {
    "loss": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "gain": "\N{BLACK UP-POINTING TRIANGLE}",
    "unclear": "\N{WHITE CIRCLE}",
}


_DIVERGENCE_HEADS = (
    *("task", "positions", "KL mean", "± stderr", "99 %", "max"),
    *("same top", "perplexity ratio", "± stderr"),
)
_OUTCOME_HEADS = (
    *("task", "metric", "filter", "n", "reference", "model", "difference", "95 %"),
    *("lost", "won", "p", "n for 1 %"),
)


@dataclass(frozen=True)
class Table:
    """Cells by row, in the order of `heads`; columns in `texts` hold words, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[str]


def heading(comparison: Comparison) -> str:
    """Names the reference and the mode of the comparison."""
    mode = comparison.reference.get("mode")
    return f"Compared with {_path(comparison)}{f' ({mode})' if mode else ''}"


def sentences(comparison: Comparison) -> Iterator[str]:
    """The verdict, and a warning where the KL was estimated from a part of the distributions."""
    line = verdict(comparison).line
    yield f"{line[:1].upper()}{line[1:]}."
    estimated = [item for item in _overall_last(comparison.divergences) if item.kl_sampling_error > 0]
    if estimated:
        worst = max(estimated, key=lambda item: item.kl_sampling_error / max(item.kl.mean, 1e-12))
        yield (
            f"KL is estimated from a part of the reference's distributions: ± {worst.kl_sampling_error:.1g} nats for "
            f"{worst.task}, where it is at least {worst.kl_lower:.4g}."
        )


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    """Distances of distributions, and differences of answers; each where there are any."""
    against = f"against {_path(comparison)}"
    if comparison.divergences:
        rows = [_divergence_cells(item) for item in _overall_last(comparison.divergences)]
        yield Table(f"Distributions, {against}", _DIVERGENCE_HEADS, rows, _DIVERGENCE_HEADS[:1])
    if comparison.outcomes:
        rows = [_outcome_cells(item) for item in comparison.outcomes]
        yield Table(f"Answers, {against}", _OUTCOME_HEADS, rows, _OUTCOME_HEADS[:3])


def _path(comparison: Comparison) -> str:
    return str(comparison.reference.get(NAME) or comparison.reference.get("path", "the reference"))


def _overall_last(divergences: Sequence[Divergence]) -> list[Divergence]:
    return sorted(divergences, key=lambda item: item.task == ALL)


def _divergence_cells(item: Divergence) -> tuple[str, ...]:
    kl, ratio_stderr = item.kl, item.perplexity_ratio_stderr
    mean, p99, maximum = (numbers.plain_nats(value) for value in (kl.mean, kl.p99, kl.maximum))
    stderr = "" if kl.stderr is None else numbers.plain_nats(kl.stderr)
    ratio = (f"{item.perplexity_ratio:.4f}", "" if ratio_stderr is None else f"{ratio_stderr:.4f}")
    agreement = f"{100 * item.top1_agreement:.1f} %"
    return (item.task, str(item.num_positions), mean, stderr, p99, maximum, agreement, *ratio)


def _outcome_cells(item: Outcome) -> tuple[str, ...]:
    needed = item.documents_needed.get("0.01")
    return (
        *(item.task, item.metric, item.filter, _documents(item)),
        *(f"{item.reference:.4f}", f"{item.candidate:.4f}", f"{item.difference:+.4f}"),
        f"{item.low:+.4f} to {item.high:+.4f}",
        *_flips(item),
        "" if needed is None else str(needed),
    )


def _flips(item: Outcome) -> tuple[str, str, str]:
    if not item.is_binary:
        return "", "", ""
    return str(item.right_to_wrong), str(item.wrong_to_right), _p(item, f"{item.mcnemar_p:.2g}")


def _p(item: Outcome, text: str) -> str:
    """Of drawn documents there is none."""
    return text if item.num_population is None else ""


def _documents(item: Outcome) -> str:
    shown = numbers.count(item.num_documents)
    return shown if item.num_population is None else f"{shown} of {numbers.count(item.num_population)}"


@dataclass(frozen=True)
class DifferenceRow:
    """An outcome as texts. `difference`, `low` and `high` are percentage points where the metric is a share."""

    candidate: str
    outcome: Outcome
    task: str
    metric: str
    difference: float
    low: float
    high: float
    tone: Tone
    shown: str
    interval: str
    reference_score: str
    candidate_score: str
    documents: str
    p: str
    needed: str
    """Documents that resolve a difference of one point, or of another size where that is unknown; may be empty."""

    @property
    def is_all(self) -> bool:
        return self.outcome.task == ALL


def difference_rows(contrasts: Iterable[Contrast]) -> list[DifferenceRow]:
    """A row for each outcome, the one over all tasks first, the candidates of one metric together."""
    found = [(contrast.candidate, outcome) for contrast in contrasts for outcome in contrast.comparison.outcomes]
    keys = [(outcome.task, outcome.metric, outcome.filter) for _, outcome in found]
    order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    found.sort(key=lambda item: (item[1].task != ALL, order[item[1].task, item[1].metric, item[1].filter]))
    return [_difference(*item) for item in found]


def _difference(candidate: str, outcome: Outcome) -> DifferenceRow:
    score = numbers.percent if outcome.is_share else numbers.nats
    difference, low, high = (outcome.unit * value for value in (outcome.difference, outcome.low, outcome.high))
    shown, interval = difference_texts(outcome)
    return DifferenceRow(
        candidate=candidate,
        outcome=outcome,
        task=task_title(outcome.task),
        metric=outcome.metric if outcome.filter == "none" else f"{outcome.metric}, {outcome.filter}",
        difference=difference,
        low=low,
        high=high,
        tone=_tone(outcome),
        shown=shown,
        interval=interval,
        reference_score=score(outcome.reference),
        candidate_score=score(outcome.candidate),
        documents=_documents(outcome),
        p=_p(outcome, numbers.probability(outcome.mcnemar_p)),
        needed=_needed(outcome),
    )


def _tone(outcome: Outcome) -> Tone:
    if outcome.low <= 0 <= outcome.high:
        return "unclear"
    return "gain" if (outcome.difference > 0) == outcome.higher_is_better else "loss"


def _needed(outcome: Outcome) -> str:
    known = ((key, outcome.documents_needed.get(key)) for key in ("0.01", "0.02", "0.005"))
    found = (f"{numbers.count(item)} for {float(key) * 100:g} pt" for key, item in known if item is not None)
    return next(found, "")


@dataclass(frozen=True)
class DivergenceRow:
    """A task's distance between the distributions, as texts."""

    candidate: str
    task: str
    is_all: bool
    positions: str
    mean: Measured
    quantiles: tuple[str, ...]
    """Median, 90 %, 99 %, 99.9 %, maximum."""

    agreement: str
    probability_difference: str
    probability_rms: str
    perplexities: str
    ratio: Measured
    estimate: str
    """The sampling error and the lower bound of a mean estimated from a part of the distributions; empty where the
    mean is exact."""


def divergence_rows(contrasts: Iterable[Contrast]) -> list[DivergenceRow]:
    """A row for each task of each comparison, all tasks together first, the candidates of one task together."""
    found = [
        (contrast.candidate, item) for contrast in contrasts for item in overall_first(contrast.comparison.divergences)
    ]
    order = {task: place for place, task in enumerate(dict.fromkeys(item.task for _, item in found))}
    return [divergence_row(*item) for item in sorted(found, key=lambda item: order[item[1].task])]


def task_title(task: str) -> str:
    """The task's name for people."""
    return "all tasks" if task == ALL else task


def overall_first(divergences: Sequence[Divergence]) -> list[Divergence]:
    """The divergence over all tasks, then the others; of a single task its own alone, as both are equal."""
    tasks = [item for item in divergences if item.task != ALL]
    return [item for item in divergences if item.task == ALL and len(tasks) != 1] + tasks


def divergence_row(candidate: str, found: Divergence) -> DivergenceRow:
    """The texts of one divergence."""
    kl = found.kl
    perplexities = (numbers.nats(found.perplexity_reference), numbers.nats(found.perplexity_candidate))
    return DivergenceRow(
        candidate=candidate,
        task=task_title(found.task),
        is_all=found.task == ALL,
        positions=numbers.count(found.num_positions),
        mean=numbers.nats_with_error(kl.mean, kl.stderr),
        quantiles=tuple(map(numbers.nats, (kl.median, kl.p90, kl.p99, kl.p999, kl.maximum))),
        agreement=numbers.percent(found.top1_agreement, found.top1_agreement_stderr),
        probability_difference=numbers.points(found.top_probability_difference),
        probability_rms=f"{found.top_probability_rms * 100:.2f}",
        perplexities=" \N{RIGHTWARDS ARROW} ".join(perplexities),
        ratio=numbers.with_error(found.perplexity_ratio, found.perplexity_ratio_stderr),
        estimate=_estimate(found),
    )


def _estimate(found: Divergence) -> str:
    error = found.kl_sampling_error
    if not math.isfinite(error) or error <= 0:
        return ""
    return f"estimated \N{PLUS-MINUS SIGN} {numbers.nats(error)}, at least {numbers.nats(found.kl_lower)}"
