"""The one line on what a comparison found, and the figures by which. Never says that two models are the same.

Only what is certain is called a loss. Where none is certain, "no loss found" needs a loss that matters to be excluded,
and the distributions to be near. A claim about drawn documents settles its own sentence: no finding is dropped for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from olive_ext.errors import counted
from olive_ext.report import numbers
from olive_ext.report.bands import band_of, certain_band, possible_band
from olive_ext.report.changes import Change, Figure, changes_of_answers, changes_of_texts
from olive_ext.report.comparison import ALL, Certainty, Comparison, Divergence, Outcome
from olive_ext.report.numbers import joined

Kind = Literal[
    "cannot_tell", "loss", "claim_broken", "distant", "too_few", "claim_open", "small_loss", "no_loss_found",
    "no_difference", "gain", "nothing_compared",
]  # fmt: skip
"""From the worst on; the last has nothing to go by."""

_KINDS: tuple[Kind, ...] = get_args(Kind)
_SAME_NATS = 1e-6


@dataclass(frozen=True)
class Verdict:
    """`kind` for colours and signs, `finding` for people, and the figures that it was found by."""

    kind: Kind
    finding: str
    figures: tuple[Figure, ...] = ()
    num_documents: int = 0

    @property
    def line(self) -> str:
        """Finding, figures and documents in one line."""
        if not self.figures:
            return self.finding
        return f"{self.finding}: {', '.join(map(str, self.figures))} ({counted(self.num_documents, 'document')})"


def verdict(comparison: Comparison) -> Verdict:
    """What a comparison found.

    A loss or a gain is certain where the 95 % interval of the accuracy difference over all documents excludes zero
    (`changes`: also other metrics, single tasks by Holm's correction of their exact p-values, Holm 1979), where the
    perplexity of whole texts changed by more than 1.96 standard errors and 0.1 %, or where the distributions are as far
    apart as with weights of 2 bits (`bands`). A loss is small where one of `comparison.matters` points is excluded. No
    loss is found where one that matters is excluded everywhere, in what has no answer, too, and distributions are as
    near as with weights of 4 bits. A loss anywhere is one of the model. No difference is found where all distributions
    are equal but for rounding, and no document flips: then few documents do, too. What drawn documents make certain
    comes first, and adds to what is against the candidate; it takes nothing away.
    """
    changes = [*changes_of_answers(comparison), *changes_of_texts(comparison)]
    divergence, certainty = comparison.overall_divergence(), comparison.certainty
    figures, documents = tuple(_figures(comparison, divergence)), sum(comparison.documents().values())
    if wrong := _non_finite(comparison):
        return Verdict("cannot_tell", f"cannot tell: non-finite {joined(wrong)}", figures, documents)
    if not figures and comparison.missing:
        return Verdict("cannot_tell", f"nothing was compared: {_unanswered(comparison)}")
    if not figures:
        return Verdict("nothing_compared", "nothing was compared: the tasks gave neither scores nor answers")
    is_same = _is_same(comparison, divergence)
    against = [] if is_same and not comparison.missing else _against(comparison, changes, divergence)
    found = [*_claimed(certainty), *against]
    found = found or [("no_difference", "no difference found") if is_same else _in_favour(changes)]
    worst = min((kind for kind, _ in found), key=_KINDS.index)
    told = [] if certainty is None else [certainty.sentence()]
    told += [text for kind, text in found if text and (kind == worst or worst != "loss")]
    if comparison.missing:
        told.append(f"{_unanswered(comparison)} {'and is' if comparison.missing == 1 else 'and are'} not in this")
    return Verdict(worst, "; ".join(told), figures, documents)


def _claimed(certainty: Certainty | None) -> Iterator[tuple[Kind, str]]:
    """What the claim's sentence, which is told whatever it is, says against the candidate."""
    if certainty is not None and certainty.verdict != "kept":
        yield "claim_broken" if certainty.verdict == "broken" else "claim_open", ""


def _against(comparison: Comparison, changes: list[Change], overall: Divergence | None) -> Iterator[tuple[Kind, str]]:
    """Everything that stands against the candidate."""
    matters = comparison.matters
    lost = [change for change in changes if change.is_lost]
    if large := [change.name for change in lost if change.may_lose(matters)]:
        yield "loss", f"loss found in {joined(large)}"
    yield from _distant(comparison, overall)
    if small := [change.name for change in lost if not change.may_lose(matters)]:
        yield "small_loss", f"loss found in {joined(small)}, of less than {matters:g} {lost[0].unit}"
    if possible := [change.possible_loss for change in changes if change not in lost and change.may_lose(matters)]:
        yield "too_few", f"too few documents to tell: {joined(possible)}"


def _distant(comparison: Comparison, overall: Divergence | None) -> Iterator[tuple[Kind, str]]:
    """Distributions that are far apart: of all positions as they are measured, or may be where documents were drawn; of
    a single task's certainly farther."""
    if overall is None:
        return
    whole = band_of(overall)
    if whole.weight is not None:
        yield whole.weight, f"the distributions are far apart, {whole.words}"
    elif overall.num_population not in (None, overall.num_documents) and (far := possible_band(overall)).weight:
        yield "too_few", f"too few documents to tell: the distributions may be far apart, {far.words}"
    for item in comparison.divergences:
        band = certain_band(item)
        if band.weight is not None and band.most_kl > whole.most_kl:
            yield band.weight, f"the distributions of {item.task} are far apart, {band.words}"


def _in_favour(changes: list[Change]) -> tuple[Kind, str]:
    gained = [change.name for change in changes if change.is_gained]
    return ("gain", f"no loss found, gain in {joined(gained)}") if gained else ("no_loss_found", "no loss found")


def _unanswered(comparison: Comparison) -> str:
    return f"{counted(comparison.missing, 'request has', 'requests have')} no answer"


def _is_same(comparison: Comparison, divergence: Divergence | None) -> bool:
    flipped = any(item.right_to_wrong + item.wrong_to_right for item in comparison.outcomes)
    return divergence is not None and divergence.kl.maximum < _SAME_NATS and not flipped


def _non_finite(comparison: Comparison) -> list[str]:
    """Names of what is NaN or infinite and must be neither."""
    distances = [f"KL of {item.task}" for item in comparison.divergences if not math.isfinite(item.kl.mean)]
    texts = [change.name for change in changes_of_texts(comparison) if not math.isfinite(change.estimate)]
    scores = [f"{item.metric} of {item.task}" for item in comparison.outcomes if not _is_finite(item)]
    outputs = [f"output of {counted(comparison.non_finite, 'request')}"] if comparison.non_finite else []
    return outputs + distances + texts + scores


def _is_finite(outcome: Outcome) -> bool:
    return all(map(math.isfinite, (outcome.difference, outcome.low, outcome.high)))


def _figures(comparison: Comparison, divergence: Divergence | None) -> Iterator[Figure]:
    """The figures of answers, distributions and whole texts."""
    yield from (change.figure for change in changes_of_answers(comparison))
    overall = comparison.overall_outcome()
    if overall is not None and overall.is_binary:
        name = "flips lost / won" if overall.task == ALL else f"{overall.task} flips lost / won"
        yield Figure(name, f"{overall.right_to_wrong} / {overall.wrong_to_right}")
    if divergence is not None:
        mean = numbers.nats_with_error(divergence.kl.mean, divergence.kl.stderr)
        words = band_of(divergence).words if math.isfinite(divergence.kl.mean) else ""
        yield Figure("mean KL", f"{mean.value} nats", ", ".join(part for part in (mean.margin, words) if part))
        yield Figure("same top token", numbers.percent(divergence.top1_agreement, divergence.top1_agreement_stderr))
    yield from (change.figure for change in changes_of_texts(comparison))
