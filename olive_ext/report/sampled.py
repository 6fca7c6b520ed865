"""Numbers of drawn documents: held to what they make certain, and metrics as estimates for all documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from olive_ext.report.comparison import ALL, Certainty, Comparison, Divergence, Outcome
from olive_ext.report.metrics import Metric, read_metrics

_Z95 = 1.959964
_SAME = 1e-9

Key = tuple[str, str, str]
"""Task, metric and filter."""


def certain_comparison(comparison: Comparison, certainty: Certainty) -> Comparison:
    """The comparison with its claim: the accuracy over all documents gets the estimate and the interval that decided, a
    mean over all positions is held to the certain side of the bound. Divergences say of how many documents they are."""
    counts: dict[str, int | None] = {item.task: item.num_population for item in comparison.outcomes}
    counts |= {metric.task: metric.n for metric in read_metrics(comparison.metrics) if metric.n is not None}
    counts[ALL] = certainty.num_documents
    divergences = [replace(item, num_population=counts.get(item.task)) for item in comparison.divergences]
    outcomes = list(comparison.outcomes)
    if certainty.metric == "accuracy_difference":
        binary = sorted((item for item in outcomes if item.is_binary), key=lambda item: item.task != ALL)
        outcomes = [_decided(item, certainty) if item is binary[0] else item for item in outcomes]
    elif (whole := comparison.overall_divergence()) is not None:
        place = comparison.divergences.index(whole)
        divergences[place] = _held(divergences[place], certainty)
    return replace(comparison, outcomes=tuple(outcomes), divergences=tuple(divergences), certainty=certainty)


def _decided(outcome: Outcome, certainty: Certainty) -> Outcome:
    sign = 1 if outcome.higher_is_better else -1
    low, high = sorted((sign * certainty.low, sign * certainty.high))
    difference = sign * certainty.estimate
    return replace(outcome, candidate=outcome.reference + difference, difference=difference, low=low, high=high)


def _held(found: Divergence, certainty: Certainty) -> Divergence:
    """The weighted mean, or the bound where that lies on the side which is out of the question."""
    hold = max if certainty.is_above else min
    if certainty.metric == "kl_mean":
        return replace(found, kl=replace(found.kl, mean=hold(found.kl.mean, certainty.bound)))
    return replace(found, top1_agreement=hold(found.top1_agreement, certainty.bound))


def sampled_metrics(
    metrics: Sequence[Metric], comparison: Comparison, results: Mapping[str, Any]
) -> tuple[Metric, ...]:
    """lm-eval's `metrics` of drawn documents: means over documents as estimates for all of the task or group, others as
    they are, with the number of documents that they are not of. `results` are lm-eval's. Without a claim `metrics`."""
    if comparison.certainty is None:
        return tuple(metrics)
    whole = {_key(metric): metric for metric in read_metrics(comparison.metrics)}
    outcomes = {(item.task, item.metric, item.filter): item for item in comparison.outcomes}
    groups: Mapping[str, Sequence[str]] = results.get("group_subtasks", {})
    found = []
    for metric in metrics:
        reference = whole.get(_key(metric))
        if metric.n is None or reference is None:
            found.append(metric)
            continue
        sampled = replace(metric, num_population=reference.n, is_estimate=False)
        members = [outcomes.get((task, metric.metric, metric.filter)) for task in _leaves(metric.task, groups)]
        found.append(_estimated(sampled, reference, [item for item in members if item is not None]))
    return tuple(found)


def _key(metric: Metric) -> Key:
    return metric.task, metric.metric, metric.filter


def _leaves(task: str, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The tasks of a group and of its groups; a task itself."""
    members = groups.get(task)
    if not members:
        yield task
    for member in members or ():
        yield from _leaves(member, groups)


def _estimated(metric: Metric, reference: Metric, outcomes: Sequence[Outcome]) -> Metric:
    """The reference's value of all documents plus the difference, where that value is the mean over all documents of
    `outcomes`: not so of a group that weighs its tasks alike, nor where nothing was drawn of some task."""
    counts = [item.num_population or 0 for item in outcomes]
    total = sum(counts)
    if not total or total != reference.n:
        return metric
    mean = math.fsum(count * item.reference for count, item in zip(counts, outcomes, strict=True)) / total
    if abs(mean - reference.value) > _SAME:
        return metric
    pairs = list(zip(counts, outcomes, strict=True))
    difference = math.fsum(count * item.difference for count, item in pairs) / total
    half_widths = [count / total * (item.high - item.low) / 2 for count, item in pairs]
    stderr = math.sqrt(math.fsum(width**2 for width in half_widths)) / _Z95
    return replace(metric, value=reference.value + difference, stderr=stderr, is_estimate=True)
