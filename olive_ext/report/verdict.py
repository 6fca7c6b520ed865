"""The one line on what a comparison found: "no loss found", never that there is none. Pure; knows no form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from olive_ext.report.comparison import ALL, Comparison, Divergence, Outcome
from olive_ext.report.numbers import joined

Kind = Literal["loss", "no_loss_found", "gain", "nothing_compared", "cannot_tell"]

_LEVEL = 0.05
_QUANTILE = 1.96
_SAME_NATS = 1e-6
_LEAST_CHANGE = 0.001
"""The least relative change of a perplexity that counts: on many texts much less is certain, and matters to nobody."""


@dataclass(frozen=True)
class Verdict:
    """`kind` for colours and signs, `line` for people: what was found, a colon, the numbers."""

    kind: Kind
    line: str


def verdict(comparison: Comparison) -> Verdict:
    """Loss or gain where the 95 % interval of the accuracy difference over all documents excludes zero, where a task's
    exact p-value stays below 5 % after Holm's correction for the number of tasks (Holm 1979), or where a perplexity of
    whole texts (a task without answers) changed by more than 1.96 standard errors and 0.1 %. A loss anywhere is
    one of the model."""
    outcome, divergence = comparison.overall_outcome(), comparison.overall_divergence()
    if outcome is None and divergence is None:
        return Verdict("nothing_compared", "nothing was compared: the tasks gave neither scores nor answers")
    numbers = _numbers(outcome, divergence)
    if wrong := _non_finite(comparison):
        return Verdict("cannot_tell", f"cannot tell: non-finite {joined(wrong)}: {numbers}")
    if (certainty := comparison.certainty) is not None:
        is_worse = certainty.verdict == "broken"
        return Verdict("loss" if is_worse else "no_loss_found", f"{certainty.sentence()}: {numbers}")
    lost, gained = _changed(comparison)
    if lost:
        return Verdict("loss", f"loss found in {joined(lost)}: {numbers}")
    if gained:
        return Verdict("gain", f"no loss found, gain in {joined(gained)}: {numbers}")
    return Verdict("no_loss_found", f"no {_kind_of_loss(outcome, divergence)} found: {numbers}")


def _non_finite(comparison: Comparison) -> list[str]:
    """Names of what is NaN or infinite and must be neither."""
    distances = [f"KL of {item.task}" for item in comparison.divergences if not math.isfinite(item.kl.mean)]
    scores = [f"{item.metric} of {item.task}" for item in comparison.outcomes if not math.isfinite(item.difference)]
    return distances + scores


def _changed(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Names of the metrics and perplexities that became worse, and of those that became better."""
    lost: list[str] = []
    gained: list[str] = []
    outcome = comparison.overall_outcome()
    if outcome is not None:
        sign = 1 if outcome.higher_is_better else -1
        low, high = sorted((sign * outcome.low, sign * outcome.high))
        name = "accuracy" if outcome.task == ALL else f"{outcome.task} {outcome.metric}"
        (lost if high < 0 else gained if low > 0 else []).append(name)
    for item in _significant(comparison.outcomes):
        name = f"{item.task} {item.metric}"
        side = lost if item.right_to_wrong > item.wrong_to_right else gained
        side += [] if name in side else [name]
    for found in _texts(comparison):
        if found.perplexity_ratio_stderr is None:
            continue
        change, margin = found.perplexity_ratio - 1, _QUANTILE * found.perplexity_ratio_stderr
        if abs(change) > max(margin, _LEAST_CHANGE):
            name = f"{found.task} perplexity ({100 * change:+.2g} ± {100 * margin:.2g} %)"
            (lost if change > 0 else gained).append(name)
    return lost, gained


def _significant(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes with p below 5 % by Holm's step-down procedure; each task counts once, by its first outcome."""
    firsts = {item.task: item for item in reversed(outcomes) if item.task != ALL}
    ordered = sorted(firsts.values(), key=lambda item: item.mcnemar_p)
    kept: list[Outcome] = []
    for rank, item in enumerate(ordered):
        if item.mcnemar_p * (len(ordered) - rank) >= _LEVEL:
            break
        kept.append(item)
    return kept


def _texts(comparison: Comparison) -> list[Divergence]:
    """The divergences of tasks that score whole texts; elsewhere the targets are answers, wrong ones among them."""
    answered = {item.task for item in comparison.outcomes}
    return [item for item in comparison.divergences if item.task not in {ALL, *answered}]


def _kind_of_loss(outcome: Outcome | None, divergence: Divergence | None) -> str:
    flipped = outcome is not None and outcome.right_to_wrong + outcome.wrong_to_right
    is_same = divergence is not None and divergence.kl.maximum < _SAME_NATS
    return "difference" if is_same and not flipped else "loss"


def _numbers(outcome: Outcome | None, divergence: Divergence | None) -> str:
    parts = []
    if outcome is not None:
        has_shares = outcome.metric.startswith(("acc", "exact_match"))
        name = "accuracy" if has_shares else f"{outcome.metric} of {outcome.task}"
        parts.append(f"{name} difference {_interval(outcome)}")
    if divergence is not None:
        parts.append(f"KL {divergence.kl.mean:.2g} nats")
        parts.append(f"top-1 agreement {100 * divergence.top1_agreement:.1f} %")
    documents = next((item.num_documents for item in (outcome, divergence) if item is not None), 0)
    return f"{', '.join(parts)} ({documents:,} documents)"


def _interval(outcome: Outcome) -> str:
    """The difference with its 95 % interval, in percent where the values are shares."""
    if outcome.is_share:
        low, high = 100 * outcome.low, 100 * outcome.high
        return f"{100 * outcome.difference:+.1f} % [{low:+.1f}, {high:+.1f}]"
    return f"{outcome.difference:+.3g} [{outcome.low:+.3g}, {outcome.high:+.3g}]"
