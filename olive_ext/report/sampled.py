"""Numbers of drawn documents: adjusted to what these make certain, and metrics as estimates for all documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from olive_ext.report.comparison import ALL, ClaimResult, Comparison, Divergence, Outcome
from olive_ext.report.metrics import Metric, read_metrics
from olive_ext.report.numbers import Z95

_SAME = 1e-9

Key = tuple[str, str, str]
"""Task, metric and filter."""


def certain_comparison(comparison: Comparison, certainty: ClaimResult) -> Comparison:
    """The comparison with its claim. The outcome that the claim is about gets the estimate and the interval that
    decided; other numbers stay as measured. Divergences state how many documents they are about."""
    counts: dict[str, int | None] = {item.task: item.num_population for item in comparison.outcomes}
    counts |= {metric.task: metric.n for metric in read_metrics(comparison.metrics) if metric.n is not None}
    counts[ALL] = certainty.num_documents
    outcomes = [_decided(item, certainty) for item in comparison.outcomes]
    divergences = [replace(item, num_population=counts.get(item.task)) for item in comparison.divergences]
    if (whole := comparison.overall_divergence()) is not None:
        index = comparison.divergences.index(whole)
        divergences[index] = _held(divergences[index], certainty)
    return replace(comparison, outcomes=tuple(outcomes), divergences=tuple(divergences), certainty=certainty)


def _decided(outcome: Outcome, certainty: ClaimResult) -> Outcome:
    """The outcome with the claim's interval, extended on both sides by the error of all documents, because a task's
    documents are a sample, too. The outcome of all documents has that error already."""
    if certainty.outcome != (outcome.task, outcome.metric, outcome.filter) or outcome.num_population is None:
        return outcome
    sign, total = 1 if outcome.higher_is_better else -1, certainty.num_documents
    flipped = (outcome.right_to_wrong + outcome.wrong_to_right) / outcome.num_documents
    margin = max(Z95 * math.sqrt(flipped / total), 1 - 0.025 ** (1 / total))
    low, high = sorted((sign * certainty.low, sign * certainty.high))
    difference = sign * _beyond(certainty.estimate, certainty)
    return replace(
        outcome,
        candidate=outcome.reference + difference,
        difference=difference,
        low=max(low - margin, -1.0),
        high=min(high + margin, 1.0),
    )


def _held(overall: Divergence, certainty: ClaimResult) -> Divergence:
    """The mean as measured; where the claim is broken, at least beyond the bound, which the weighted mean may just
    miss. A kept claim changes nothing: it may be about cut positions, while a bound is about all."""
    if certainty.metric == "top1_agreement" and not certainty.is_above:
        return replace(overall, top1_agreement=_beyond(overall.top1_agreement, certainty))
    if certainty.metric == "kl_mean" and certainty.is_above:
        return replace(overall, kl=replace(overall.kl, mean=_beyond(overall.kl.mean, certainty)))
    return overall


def _beyond(value: float, certainty: ClaimResult) -> float:
    """`value`, or the nearest that certainly breaks the bound."""
    if certainty.verdict != "loss" or math.isnan(value):
        return value
    sign = 1 if certainty.is_above else -1
    return sign * max(sign * value, sign * certainty.bound + _SAME)


def sampled_metrics(
    metrics: Sequence[Metric], comparison: Comparison, results: Mapping[str, Any]
) -> tuple[Metric, ...]:
    """lm-eval's `metrics` of drawn documents: means over documents become estimates for all of the task or group;
    others stay, with the number of documents that they leave out. `results` are lm-eval's. Without a claim, `metrics`
    unchanged."""
    if comparison.certainty is None:
        return tuple(metrics)
    whole = {_key(metric): metric for metric in read_metrics(comparison.metrics)}
    outcomes = {(item.task, item.metric, item.filter): item for item in comparison.outcomes}
    groups: Mapping[str, Sequence[str]] = results.get("group_subtasks", {})
    estimates = []
    for metric in metrics:
        reference = whole.get(_key(metric))
        if metric.n is None or reference is None:
            estimates.append(metric)
            continue
        sampled = replace(metric, num_population=reference.n, is_estimate=False)
        members = [outcomes.get((task, metric.metric, metric.filter)) for task in _leaves(metric.task, groups)]
        estimates.append(_estimated(sampled, reference, [item for item in members if item is not None]))
    return tuple(estimates)


def _key(metric: Metric) -> Key:
    return metric.task, metric.metric, metric.filter


def _leaves(task: str, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    members = groups.get(task)
    if not members:
        yield task
    for member in members or ():
        yield from _leaves(member, groups)


def _estimated(metric: Metric, reference: Metric, outcomes: Sequence[Outcome]) -> Metric:
    """The reference's value of all documents plus the difference, where that value is the mean over all documents of
    `outcomes`: not so of a group that weighs its tasks alike, nor where nothing was drawn of some task."""
    counts = [item.num_population or item.num_documents for item in outcomes]
    total = sum(counts)
    if not total or total != reference.n:
        return metric
    mean = math.fsum(count * item.reference for count, item in zip(counts, outcomes, strict=True)) / total
    if abs(mean - reference.value) > _SAME:
        return metric
    pairs = list(zip(counts, outcomes, strict=True))
    difference = math.fsum(count * item.difference for count, item in pairs) / total
    half_widths = [count / total * (item.high - item.low) / 2 for count, item in pairs]
    stderr = math.sqrt(math.fsum(width**2 for width in half_widths)) / Z95
    return replace(metric, value=reference.value + difference, stderr=stderr, is_estimate=True)
