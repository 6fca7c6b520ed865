"""Metrics: read from lm-eval's results, made from a comparison, and looked up by name. Knows no report and no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, SupportsFloat, TypeGuard

from olive_ext.report.comparison import ALL, Comparison, Divergence, Outcome, primary_outcomes
from olive_ext.report.numbers import Number, count_of

COMPARISON_NAMES = (
    *("kl_mean", "kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max"),
    *("top1_agreement", "top_probability_rms", "perplexity_ratio"),
    *("flips_right_to_wrong", "flips_wrong_to_right"),
    *("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high", "mcnemar_p"),
)
"""Names of `comparison_metrics`, by which bounds, tables and Olive's goals know a comparison's numbers."""

GENERATED_TOKENS, CUT_OFF, STOPPED = "generated_tokens", "cut_off", "stopped"
LENGTHS = (GENERATED_TOKENS, "thinking_tokens", "thinking_forced", CUT_OFF, STOPPED)
"""Metrics of generated answers that are separated from their reasoning, means over a document's answers: all tokens,
tokens of the reasoning, shares that the thinking budget, the length and a stop string ended. They are neither loss nor
gain, with two exceptions: if certainly more answers are cut off, by more than what matters, the verdict is a loss; if
many more end at stop strings, it is not decided."""

MISSING = "missing"
"""The task whose metric "requests" counts the requests without an answer, where there are any."""

NON_FINITE = "non_finite"
"""The task whose metric "requests" counts the requests with an output that is NaN or infinite, where there are any."""

OPEN_CLAIM = "open_claim"
"""The task whose only metric, "open_claim_<metric>", says that a claim on that metric could not be decided, and is the
number of tasks that it is about."""

_UNWEIGHTED = ("kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max")
"""Comparison metrics that are not weighted where documents were drawn (`"documents": "enough"`)."""

DRAWN_ONLY = (*_UNWEIGHTED, "flips_right_to_wrong", "flips_wrong_to_right", "mcnemar_p")
"""Comparison metrics that say nothing of all documents where some were drawn: no bound may name them then."""


@dataclass(frozen=True)
class Metric:
    """One number of one task."""

    task: str
    metric: str
    """lm-eval's name without the filter, for instance "acc" or "word_perplexity"."""

    filter: str
    """lm-eval's filter, "none" where the task has none."""

    value: Number
    stderr: float | None = None
    """Standard error of `value`; None where lm-eval gives none."""

    higher_is_better: bool | None = True
    """None where neither the task nor lm-eval says it."""

    n: int | None = None
    """Documents scored; None where the number does not come from documents."""

    num_population: int | None = None
    """All documents, where `n` were drawn from them; None where all were scored."""

    is_estimate: bool = True
    """Whether the value of drawn documents is weighted so that it is one for all documents, or is of them alone."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Task, metric and filter."""
        return self.task, self.metric, self.filter

    @property
    def is_of_drawn(self) -> bool:
        """Whether the value is of drawn documents alone, and says nothing of the others."""
        return not self.is_estimate and self.num_population not in (None, self.n)

    @property
    def documents(self) -> str:
        """The number of documents for people; empty where there is none."""
        note = ", unweighted" if self.is_of_drawn else ""
        return "" if self.n is None else f"{count_of(self.n, self.num_population)}{note}"


def read_metrics(results: Mapping[str, Any]) -> tuple[Metric, ...]:
    """The numbers of every task and group in lm-eval's `results`, in its order.

    lm-eval names a number "metric,filter" and its error bar "metric_stderr,filter"; an entry without a filter (name,
    alias, sample_len) is no metric.
    """
    return tuple(metric for task in results.get("results", {}) for metric in _of_task(task, results))


def non_finite_requests(metrics: Iterable[Metric]) -> int:
    """The requests that the metrics hold to be without a finite output: with any, the other metrics mean nothing."""
    return int(sum(metric.value for metric in metrics if metric.task == NON_FINITE))


def is_open(metric: Metric, metrics: Iterable[Metric]) -> bool:
    """Whether a claim on `metric` over all tasks, or the only one, is open, so its value meets no bound or goal."""
    claims = [item for item in metrics if item.metric == f"{OPEN_CLAIM}_{metric.metric}"]
    return any(metric.task == ALL or item.value == 1 for item in claims)


def _of_task(task: str, results: Mapping[str, Any]) -> Iterator[Metric]:
    values: Mapping[str, Any] = results["results"][task]
    directions = results.get("higher_is_better", {}).get(task) or {}
    for key, value in values.items():
        name, comma, filter_name = key.partition(",")
        is_error_bar = name.endswith("_stderr") and f"{name.removesuffix('_stderr')},{filter_name}" in values
        if not comma or not _is_number(value) or is_error_bar:
            continue
        error = values.get(f"{name}_stderr,{filter_name}")
        stderr = float(error) if _is_number(error) else None
        yield Metric(task, name, filter_name, float(value), stderr, directions.get(name), _count(task, key, results))


def as_number(value: object) -> object:
    """A value that is as good as a number (a tensor of one element, a decimal) as one; any other as it is."""
    try:
        return value if isinstance(value, Real) or not isinstance(value, SupportsFloat) else float(value)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several
        return value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _count(task: str, key: str, results: Mapping[str, Any]) -> int | None:
    """Documents scored: of the task, or in a group of all tasks that have this metric."""
    counted = results.get("n-samples", {}).get(task)
    if counted is not None:
        return int(counted["effective"])
    values = results["results"][task]
    count = (values.get("sample_count") or {}).get(key, values.get("sample_len"))
    return None if count is None else int(count)


def comparison_metrics(comparison: Comparison) -> tuple[Metric, ...]:
    """The metrics `COMPARISON_NAMES`, so that goals, bounds and tables can name a comparison's numbers. Each task has
    the metrics of its divergence, and the flips and accuracy of its primary metric (`primary_outcomes`).

    The task "all" has them over all tasks; where only one task has them, they are that task's.
    """
    divergences = list(comparison.divergences)
    firsts = list(primary_outcomes(comparison.outcomes).values())
    if len(divergences) == 1:
        divergences.append(replace(divergences[0], task=ALL))
    if len(firsts) == 1:
        firsts.append(replace(firsts[0], task=ALL))
    of_divergences = [metric for item in divergences for metric in _of_divergence(item)]
    number = comparison.non_finite
    wrong = [Metric(NON_FINITE, "requests", "none", float(number), higher_is_better=False)] if number else []
    claim = comparison.certainty
    if claim is not None and claim.verdict == "unknown":
        about = firsts if claim.metric == "accuracy_difference" else divergences
        number = sum(item.task != ALL for item in about)
        wrong.append(Metric(OPEN_CLAIM, f"{OPEN_CLAIM}_{claim.metric}", "none", float(number), higher_is_better=False))
    known = {item.task for item in divergences}
    texts = (item for item in comparison.texts if item.task not in known)
    ratios = ((item.task, item.perplexity_ratio, item.num_documents) for item in texts)
    of_texts = (Metric(name, "perplexity_ratio", "none", ratio, None, False, n) for name, ratio, n in ratios)
    return (*of_divergences, *of_texts, *(metric for item in firsts for metric in _of_outcome(item)), *wrong)


def _of_divergence(item: Divergence) -> Iterator[Metric]:
    kl = item.kl
    values = {
        "kl_mean": (kl.mean, kl.stderr),
        **{f"kl_{name}": (getattr(kl, name), None) for name in ("median", "p90", "p99", "p999")},
        "kl_max": (kl.maximum, None),
        "top1_agreement": (item.top1_agreement, item.top1_agreement_stderr),
        "top_probability_rms": (item.top_probability_rms, None),
        "perplexity_ratio": (item.perplexity_ratio, item.perplexity_ratio_stderr),
    }
    for name, (value, stderr) in values.items():
        is_better, n = name == "top1_agreement", item.num_documents
        yield Metric(item.task, name, "none", value, stderr, is_better, n, item.num_population, name not in _UNWEIGHTED)


def _of_outcome(item: Outcome) -> Iterator[Metric]:
    sign = 1 if item.higher_is_better else -1
    low, high = sorted((sign * item.low, sign * item.high))
    values = {
        "flips_right_to_wrong": item.right_to_wrong,
        "flips_wrong_to_right": item.wrong_to_right,
        "accuracy_difference": sign * item.difference,
        "accuracy_difference_low": low,
        "accuracy_difference_high": high,
    }
    if item.num_population is None:  # the flips decided when to stop
        values["mcnemar_p"] = item.mcnemar_p
    for name, value in values.items():
        is_better = name != "flips_right_to_wrong"
        is_estimate, n = name.startswith("accuracy"), item.num_documents
        yield Metric(item.task, name, "none", float(value), None, is_better, n, item.num_population, is_estimate)


def matching(
    metrics: Iterable[Metric], name: str, task: str | None = None, filter_name: str | None = None
) -> list[Metric]:
    """The metrics that a name in a recipe may stand for; exactly one where all is well.

    Without a task `name` may also be a task's ("size_on_disk"), or a long name ("task/metric", "task/metric,filter"),
    and a comparison over all tasks goes before those of single tasks. A metric whose filter is "" may have any.
    """
    matches = [
        metric
        for metric in metrics
        if task in (None, metric.task)
        and filter_name in (None, metric.filter or filter_name)
        and (name == metric.metric or (task is None and name in (metric.task, *long_names(metric))))
    ]
    return [metric for metric in matches if metric.task == ALL] or matches


def long_names(metric: Metric) -> tuple[str, str]:
    """ "task/metric" and "task/metric,filter"."""
    short = f"{metric.task}/{metric.metric}"
    return short, f"{short},{metric.filter}"


def listed(metrics: Iterable[Metric]) -> str:
    """The names to choose from, with the filter where the short name stands for several."""
    names = [long_names(metric) for metric in metrics]
    short = [name for name, _ in names]
    return ", ".join(long if short.count(name) > 1 else name for name, long in names) or "none"
