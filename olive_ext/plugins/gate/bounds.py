"""What is held of an evaluation: each outcome with its decision and its figures. Knows no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from olive_ext.errors import counted
from olive_ext.report.changes import changes_of, difference_texts, judged
from olive_ext.report.comparison import ALL, Certainty, Comparison, Outcome
from olive_ext.report.verdict import Reason, Verdict, possible_loss

Decision = Literal["passed", "loss", "cannot tell"]


@dataclass(frozen=True)
class Bound:
    """One metric of one task by one filter, or all answers together, with what was decided of it."""

    name: str
    decision: Decision
    text: str
    """The figures: difference, interval, documents, flips, p-value."""


CLAIMED: Mapping[str, Decision] = {"kept": "passed", "broken": "loss", "open": "cannot tell"}


def of_claim(certainty: Certainty, comparison: Comparison) -> Bound:
    """The bound of a claim about drawn documents."""
    interval = (
        f"difference {100 * certainty.estimate:+.2f} pt ({100 * certainty.low:+.2f} to {100 * certainty.high:+.2f})"
    )
    flips = comparison.overall_outcome()
    flipped = "" if flips is None else f", flips {flips.right_to_wrong} lost / {flips.wrong_to_right} won"
    return Bound(certainty.metric, CLAIMED[certainty.verdict], f"{interval}{flipped}; {certainty.sentence()}")


def bounds_of(comparison: Comparison, found: Verdict) -> list[Bound]:
    """Every outcome with its decision."""
    changes = changes_of(comparison)
    deciding, bounds = judged(changes), []
    for change in changes:
        decision: Decision = "passed"
        note = "" if change in deciding else "of first answers: the mean of all decides"
        if found.code == "cannot_tell":
            decision, note = "cannot tell", found.headline
        elif change.is_lost:
            decision = "loss" if change.may_lose(comparison.matters) else "passed"
            note = f"loss of less than {comparison.matters:g} {change.unit}" * (decision == "passed")
        elif change in deciding and change.may_lose(comparison.matters):
            reason = Reason("too_few", change.task, change.metric, -change.low, change.unit, change.advice)
            decision, note = "cannot tell", possible_loss(reason)
        text = f"perplexity {change.figure.value} ({change.figure.note})"
        name, figures = (change.name, text) if change.outcome is None else _named(change.outcome)
        bounds.append(Bound(name, decision, "; ".join(filter(None, [figures, note]))))
    return bounds


def _named(item: Outcome) -> tuple[str, str]:
    """ "arc_easy acc", "gsm8k exact_match (strict-match)", "accuracy over all tasks"; and its figures."""
    name = f"{item.metric} over all tasks"
    if item.task != ALL:
        name = f"{item.task} {item.metric}" + ("" if item.filter == "none" else f" ({item.filter})")
    shown, interval = difference_texts(item)
    percent = item.unit
    text = f"{percent * item.reference:.4g} to {percent * item.candidate:.4g}, difference {shown} ({interval})"
    flips = f", flips {item.right_to_wrong} lost / {item.wrong_to_right} won, p {item.mcnemar_p:.3g}"
    return name, f"{text}, {counted(item.num_documents, 'document')}{flips if item.is_binary else ''}"
