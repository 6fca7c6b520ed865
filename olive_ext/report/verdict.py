"""The verdict on a comparison: one sentence to act on, and its evidence. It never says that two models are the same.

Only what is certain is called a loss. Where none is certain, "no loss found" needs a loss that matters to be excluded,
and the distributions to be near. A claim about drawn documents settles its own sentence: no finding is dropped for it.

**Bands.** How far apart two models' distributions are, in words: by what is published of real quantizations
(llama.cpp, tools/perplexity/README.md, Llama 3 8B on WikiText-2, tables "LLaMA 3 8b Scoreboard" and "LLaMA 2 vs. LLaMA
3", revision f364eb6f), each against FP16. Mean KL in nats: q8_0 0.0014, q6_K 0.0055; q5_K_M 0.011, q4_K_M 0.031, q4_0
0.072; q3_K_M 0.102, q3_K_S 0.228; iq2_M 0.326, q2_K 0.445, iq1_S 2.2. Same top token (Llama 3 8B and Llama 2 7B): q8_0
97.7 and 98.8 %, q6_K 96.0 and 97.5 %, q4_K_M 91.9 and 94.7 %, q2_K 71.1 and 85.6 %. The limits lie between these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from olive_ext.errors import counted
from olive_ext.report import numbers
from olive_ext.report.changes import Change, Figure, changes_of_answers, changes_of_texts, unpaired
from olive_ext.report.comparison import ALL, Certainty, Comparison, Divergence, Outcome
from olive_ext.report.metrics import LENGTHS
from olive_ext.report.numbers import Z95, joined
from olive_ext.report.place import Place, PlaceKind
from olive_ext.report.stages import Unnoticed, stage_sentences

Kind = Literal[
    "cannot_tell", "loss", "claim_broken", "distant", "too_few", "claim_open", "small_loss", "no_loss_found",
    "no_difference", "gain", "nothing_compared",
]  # fmt: skip
"""From the worst on; the last has nothing to go by."""

_PLACE_KINDS: dict[PlaceKind, Kind] = {
    "same": "no_difference",
    "kernels": "no_loss_found",
    "different": "loss",
    "cannot_tell": "cannot_tell",
}

_KINDS: tuple[Kind, ...] = get_args(Kind)
_SAME_NATS = 1e-6

SENTENCES = "sentence_accuracy"
"""The share of transcripts in which no word is wrong: of the documents that a word error rate is of, once more."""


@dataclass(frozen=True)
class Band:
    """Distances up to `most_kl` nats and from `least_agreement` on, which is a share of positions."""

    words: str
    most_kl: float
    least_agreement: float
    weight: Literal["distant", "loss"] | None = None
    """What the distance alone says of the candidate: nothing, that it is in doubt, or that it has lost."""


BANDS = (
    Band("as with weights of 6 to 8 bits", 0.01, 0.96),
    Band("as with weights of 4 to 5 bits", 0.09, 0.88),
    Band("as with weights of 3 bits", 0.3, 0.7, "distant"),
    Band("as with weights of 2 bits or fewer", float("inf"), 0.0, "loss"),
)


@dataclass(frozen=True)
class Verdict:
    """A sentence to act on, and its evidence; `kind` is for colours and signs."""

    kind: Kind
    headline: str
    evidence: tuple[str, ...] = ()
    """Further findings, a sentence each."""

    figures: tuple[Figure, ...] = ()
    num_documents: int = 0

    @property
    def finding(self) -> str:
        """Headline and evidence."""
        return "; ".join((self.headline, *self.evidence))

    @property
    def lines(self) -> tuple[str, ...]:
        """Headline, evidence, and the figures with the number of documents, a line each."""
        if not self.figures:
            return (self.headline, *self.evidence)
        figures = f"{', '.join(map(str, self.figures))} ({counted(self.num_documents, 'document')})"
        return (self.headline, *self.evidence, figures)


def verdict(comparison: Comparison) -> Verdict:
    """The verdict on a comparison.

    A loss or a gain is certain where the 95 % interval of the accuracy difference over all documents excludes zero
    (`changes`: also other metrics, each by Holm's correction of their exact p-values, Holm 1979), where the
    perplexity of whole texts changed by more than 1.96 standard errors and 0.1 %, or where the distributions are as far
    apart as with weights of 2 bits (`bands`). A loss is small where one of `comparison.matters` points is excluded. No
    loss is found where one that matters is excluded everywhere, in what has no answer, too, distributions are as near
    as with weights of 4 bits, and every task is judged by documents or as texts (`unpaired`). A loss anywhere is one of
    the model. No difference is found where all distributions are equal but for rounding, and no document flips: then
    few documents do, too. What drawn documents make certain comes first, and adds to what is against the candidate; it
    takes nothing away.
    """
    if comparison.place is not None:
        alone = verdict(replace(comparison, place=None))
        return _of_places(comparison.place, alone, comparison.missing or len(comparison.damaged))
    changes = [*changes_of_answers(comparison), *changes_of_texts(comparison)]
    divergence, certainty = comparison.overall_divergence(), comparison.certainty
    figures, documents = tuple(_figures(comparison, divergence)), num_documents(comparison)
    if wrong := _non_finite(comparison):
        return Verdict("cannot_tell", f"cannot tell: non-finite {joined(wrong)}", (), figures, documents)
    if not figures and comparison.missing:
        return Verdict("cannot_tell", f"nothing was compared: {_unanswered(comparison)}")
    if not figures:
        why = _incomparable(comparison) or "the tasks gave neither scores nor answers"
        return Verdict("nothing_compared", f"nothing was compared: {why}")
    is_same = _is_same(comparison, divergence)
    against = [] if is_same and not comparison.missing else _against(comparison, changes, divergence)
    findings = [*_claimed(certainty), *_damaged(comparison), *against]
    if not findings:
        reach = "" if comparison.reach is None else f", {comparison.reach}"
        findings = [("no_difference", f"no difference found{reach}") if is_same else _in_favour(changes)]
    worst = min((kind for kind, _ in findings), key=_KINDS.index)
    first = [text for kind, text in findings if kind == worst]
    others = [text for kind, text in findings if kind != worst and worst != "loss"]
    others = [text for _, text in _damaged(comparison)] + others
    others = [*stage_sentences(comparison.stages, _unnoticed(certainty)), *others]
    if certainty is not None and certainty.sentence() not in first:
        others.insert(0, certainty.sentence())
    if comparison.missing:
        others.append(f"{_unanswered(comparison)} {'and is' if comparison.missing == 1 else 'and are'} not in this")
    headline, *evidence = dict.fromkeys([*first, *others])
    return Verdict(worst, headline, tuple(evidence), figures, documents)


def _of_places(place: Place, answers: Verdict, missing: int) -> Verdict:
    """The verdict on one model in two places; that on its answers is evidence, unless they cannot be compared. What is
    lost as of two models, or has no answer, is never green."""
    if answers.kind in ("cannot_tell", "nothing_compared"):
        return answers
    kind, headline = _PLACE_KINDS[place.kind], place.headline
    if place.kind in ("same", "kernels") and (missing or answers.kind in ("loss", "claim_broken", "distant")):
        kind, headline = "cannot_tell", f"cannot tell: {headline} where both were scored, but not all is the same"
    evidence = (*place.evidence(), f"as two models: {answers.finding if missing else answers.headline}")
    return replace(answers, kind=kind, headline=headline, evidence=evidence)


def _unnoticed(certainty: Certainty | None) -> Unnoticed:
    """What is within the nearest band, and within the claim's bound."""
    nearest = BANDS[0]
    if certainty is not None and certainty.metric == "kl_mean" and certainty.side == "below":
        return Unnoticed(min(nearest.most_kl, certainty.bound), nearest.least_agreement)
    if certainty is not None and certainty.metric == "top1_agreement" and certainty.side == "above":
        return Unnoticed(nearest.most_kl, max(nearest.least_agreement, certainty.bound))
    return Unnoticed(nearest.most_kl, nearest.least_agreement)


def _claimed(certainty: Certainty | None) -> Iterator[tuple[Kind, str]]:
    """The claim's sentence, where it is against the candidate."""
    if certainty is not None and certainty.verdict != "kept":
        yield "claim_broken" if certainty.verdict == "broken" else "claim_open", certainty.sentence()


def _damaged(comparison: Comparison) -> Iterator[tuple[Kind, str]]:
    """Constants that are not the reference's, which the tasks need not have reached."""
    for name, what in [*comparison.damaged.items()][:1]:
        more = f", and {counted(len(comparison.damaged) - 1, 'other')}" if len(comparison.damaged) > 1 else ""
        yield "too_few", f"damaged: '{name}' {what}{more}"


def _against(comparison: Comparison, changes: list[Change], overall: Divergence | None) -> Iterator[tuple[Kind, str]]:
    """Everything that stands against the candidate."""
    matters, stops = comparison.matters, comparison.stops
    if comparison.asked is not None:
        yield "cannot_tell", f"cannot tell: {comparison.asked.sentence()}; distributions are not compared"
    if stops is not None and stops.missing:
        yield "too_few", f"not decided: {stops.sentence()}"
    lost = [change for change in changes if change.is_lost]
    if large := [change.name for change in lost if change.may_lose(matters)]:
        yield "loss", f"loss found in {joined(large)}"
    if endless := [item.task for item in comparison.lengths if item.metric == LENGTHS[-1] and 100 * item.low > matters]:
        yield "loss", f"loss found: more answers of {joined(endless)} run to their limit"
    yield from _distant(comparison, overall)
    if small := [change.name for change in lost if not change.may_lose(matters)]:
        yield "small_loss", f"small loss found in {joined(small)}, of less than {matters:g} {lost[0].unit}"
    if possible := [change.possible_loss for change in changes if change not in lost and change.may_lose(matters)]:
        yield "too_few", f"not decided: {joined(possible)}"
    if other := _incomparable(comparison):
        yield "too_few", f"not decided: {other}"


def _distant(comparison: Comparison, overall: Divergence | None) -> Iterator[tuple[Kind, str]]:
    """Distributions that are far apart: of all positions as they are measured, or may be where documents were drawn; of
    a single task's certainly farther."""
    if overall is None:
        return
    whole = band_of(overall)
    if whole.weight is not None:
        yield whole.weight, f"the distributions are far apart, {whole.words}"
    elif overall.num_population not in (None, overall.num_documents) and (far := possible_band(overall)).weight:
        yield "too_few", f"not decided: the distributions may be far apart, {far.words}"
    for item in comparison.divergences:
        band = certain_band(item)
        if band.weight is not None and band.most_kl > whole.most_kl:
            yield band.weight, f"the distributions of {item.task} are far apart, {band.words}"


def _in_favour(changes: list[Change]) -> tuple[Kind, str]:
    gained = [change.name for change in changes if change.is_gained]
    return ("gain", f"no loss found, gain in {joined(gained)}") if gained else ("no_loss_found", "no loss found")


def _unanswered(comparison: Comparison) -> str:
    return f"{counted(comparison.missing, 'request has', 'requests have')} no answer"


def _incomparable(comparison: Comparison) -> str:
    """What no statement is made about, empty where there is none."""
    names = [*unpaired(comparison).values()]
    return f"{joined(names)} {'has' if len(names) == 1 else 'have'} no values by document to compare" if names else ""


def _is_same(comparison: Comparison, divergence: Divergence | None) -> bool:
    if unpaired(comparison).keys() - {item.task for item in comparison.divergences}:
        return False
    if comparison.changed_answers or comparison.asked or (comparison.stops and comparison.stops.missing):
        return False
    flipped = any(item.right_to_wrong + item.wrong_to_right or item.difference for item in comparison.outcomes)
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


def band_of(item: Divergence) -> Band:
    """The nearest band that holds both the mean KL and the share of equal top tokens, which must be finite."""
    return next(band for band in BANDS if item.kl.mean <= band.most_kl and item.top1_agreement >= band.least_agreement)


def certain_band(item: Divergence) -> Band:
    """The nearest band that is within 1.96 standard errors of mean KL and share, which must be finite."""
    return BANDS[0] if None in _errors(item) else band_of(_moved(item, -Z95))


def possible_band(item: Divergence) -> Band:
    """The farthest band that is within 1.96 standard errors of mean KL and share, which must be finite."""
    return BANDS[-1] if None in _errors(item) else band_of(_moved(item, Z95))


def _errors(item: Divergence) -> tuple[float | None, float | None]:
    return item.kl.stderr, item.top1_agreement_stderr


def _moved(item: Divergence, errors: float) -> Divergence:
    """The divergence, farther from the reference by so many standard errors."""
    kl, agreement = (error or 0.0 for error in _errors(item))
    farther = replace(item.kl, mean=item.kl.mean + errors * kl)
    return replace(item, kl=farther, top1_agreement=item.top1_agreement - errors * agreement)


def num_documents(comparison: Comparison) -> int:
    """Of all tasks; those whose sentences are judged beside their words count once."""
    beside = {item.task for item in comparison.outcomes if item.metric == SENTENCES}
    return sum(number for task, number in comparison.documents().items() if task not in beside)
