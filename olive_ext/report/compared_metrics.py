"""A comparison's numbers as metrics, so that goals, bounds and tables can name them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from olive_ext.report.comparison import ALL, Comparison, Divergence, Outcome
from olive_ext.report.report import Metric

NAMES = (
    *("kl_mean", "kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max"),
    *("top1_agreement", "top_probability_rms", "perplexity_ratio"),
    *("flips_right_to_wrong", "flips_wrong_to_right"),
    *("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high", "mcnemar_p"),
)


def comparison_metrics(comparison: Comparison) -> tuple[Metric, ...]:
    """Of each task: kl_mean, kl_median, kl_p90, kl_p99, kl_p999, kl_max, top1_agreement, top_probability_rms,
    perplexity_ratio; of its first metric that is right or wrong: flips_right_to_wrong, flips_wrong_to_right,
    accuracy_difference, accuracy_difference_low, accuracy_difference_high, mcnemar_p.

    The task "all" has them over all tasks; where only one task has them, they are that task's.
    """
    divergences = list(comparison.divergences)
    firsts = list({item.task: item for item in reversed(comparison.outcomes) if item.is_binary}.values())[::-1]
    if len(divergences) == 1:
        divergences.append(replace(divergences[0], task=ALL))
    if len(firsts) == 1:
        firsts.append(replace(firsts[0], task=ALL))
    of_divergences = [metric for item in divergences for metric in _of_divergence(item)]
    return (*of_divergences, *(metric for item in firsts for metric in _of_outcome(item)))


def _of_divergence(found: Divergence) -> Iterator[Metric]:
    kl, task, n = found.kl, found.task, found.num_documents
    yield Metric(task, "kl_mean", "none", kl.mean, kl.stderr, False, n)
    quantiles = {"median": kl.median, "p90": kl.p90, "p99": kl.p99, "p999": kl.p999, "max": kl.maximum}
    for name, value in quantiles.items():
        yield Metric(task, f"kl_{name}", "none", value, None, False, n)
    yield Metric(task, "top1_agreement", "none", found.top1_agreement, found.top1_agreement_stderr, True, n)
    yield Metric(task, "top_probability_rms", "none", found.top_probability_rms, None, False, n)
    yield Metric(task, "perplexity_ratio", "none", found.perplexity_ratio, found.perplexity_ratio_stderr, False, n)


def _of_outcome(found: Outcome) -> Iterator[Metric]:
    sign = 1 if found.higher_is_better else -1
    low, high = sorted((sign * found.low, sign * found.high))
    values = {
        "flips_right_to_wrong": (found.right_to_wrong, False),
        "flips_wrong_to_right": (found.wrong_to_right, True),
        "accuracy_difference": (sign * found.difference, True),
        "accuracy_difference_low": (low, True),
        "accuracy_difference_high": (high, True),
        "mcnemar_p": (found.mcnemar_p, True),
    }
    for name, (value, is_better) in values.items():
        yield Metric(found.task, name, "none", float(value), None, is_better, found.num_documents)
