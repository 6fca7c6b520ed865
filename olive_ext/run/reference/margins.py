"""Both models' margins, from their answers and from the tokens that were scored: what `report.margins` holds.

Of a task with choices the margins of its answers, else those of its tokens; of generated answers the first token that
differs. Knows no model and no session; a tokenizer gives texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.report.margins import FirstDifference, FragileDocument, Margins, PredictedChanges, TaskMargins
from olive_ext.run.reference.answers import Answers, choices_of, question_of
from olive_ext.run.reference.observer import Answered, Observer, Weights
from olive_ext.stats.margins import LEAST_DOCUMENTS, ChangeModel, noise, shrink_factor

FloatArray = npt.NDArray[np.float64]
DocumentMargins: TypeAlias = Mapping[tuple[str, int], tuple[float, float]]
"""The reference's and the candidate's margin of each document's answer, by task and number."""

MOST_SHOWN = 50
"""Fragile documents, and first differences, that a report holds."""

MORE = 1000
"""Documents for which changes are predicted where a task has no others."""

_AROUND = 200
"""Characters shown before a difference, and of each continuation."""


@dataclass(frozen=True)
class Both:
    """Both models' answers, the candidate's `results` with samples, lm-eval's `tasks` by name, and what was seen."""

    reference: Sequence[Answers]
    candidate: Sequence[Answers]
    results: Mapping[str, Any]
    tasks: Mapping[str, Any]
    observer: Observer | None = None
    """Of the candidate beside the reference."""

    reference_observer: Observer | None = None
    weights: Weights | None = None

    def pairs(self) -> Iterator[tuple[Answers, Answers]]:
        """Both models' answers to each task, by its first filter."""
        theirs = {(item.task, item.filter): item for item in self.reference}
        firsts = {item.task: item for item in reversed(self.candidate)}
        for own in sorted(firsts.values(), key=list(self.candidate).index):
            if (own.task, own.filter) in theirs:
                yield theirs[own.task, own.filter], own

    def weight(self, task: str, documents: npt.NDArray[np.int64]) -> FloatArray:
        """How many documents each one stands for."""
        weights = None if self.weights is None else self.weights[task]
        return np.array([1.0 if weights is None else weights[number] for number in documents.tolist()], np.float64)


@dataclass(frozen=True)
class _Items:
    """Margins [N] of a task's answers or tokens, the documents [N] that they belong to, and the rest that is told."""

    documents: npt.NDArray[np.int64]
    reference: FloatArray
    candidate: FloatArray
    changed: npt.NDArray[np.bool_]

    def finite(self) -> _Items:
        known = np.isfinite(self.reference) & np.isfinite(self.candidate)
        return _Items(self.documents[known], self.reference[known], self.candidate[known], self.changed[known])

    def least(self) -> _Items:
        """Each document's least margins, and whether any of its items has changed."""
        documents, places = np.unique(self.documents, return_inverse=True)
        reference, candidate = (np.full(len(documents), math.inf) for _ in range(2))
        np.minimum.at(reference, places, self.reference)
        np.minimum.at(candidate, places, self.candidate)
        return _Items(documents, reference, candidate, np.bincount(places, self.changed) > 0)


def measured(both: Both, tokenizer: Any = None) -> tuple[Margins | None, DocumentMargins]:
    """The margins of all tasks, None where there are none; and those of each document's answer."""
    tasks, fragile, differences = [], [], []
    by_document: dict[tuple[str, int], tuple[float, float]] = {}
    for reference, own in both.pairs():
        answers = _answers(reference, own)
        items = (answers if len(answers.documents) else _tokens(both, own.task)).finite()
        if not len(items.documents):
            continue
        is_text = both.observer is not None and not len(answers.documents) and both.observer.is_text(own.task)
        differing = _first_differences(both, own.task, tokenizer)
        documents = items if len(answers.documents) else items.least()
        task = _task_margins(both, reference, own, items, None if is_text else documents, differing)
        tasks.append(task)
        differences.append(differing or [])
        if not is_text:
            numbers, margins = documents.documents.tolist(), (documents.reference, documents.candidate)
            pairs = zip(*(each.tolist() for each in margins), strict=True)
            by_document |= zip(((own.task, number) for number in numbers), pairs, strict=True)
            fragile.append(_fragile(both, own, documents, task.noise))
    if not tasks:
        return None, {}
    nearest = sorted((item for part in fragile for item in part), key=lambda item: item.noise_share)[:MOST_SHOWN]
    surest = sorted((item for part in differences for item in part), key=lambda item: -(item.reference_margin or 0.0))
    return Margins(tuple(tasks), tuple(nearest), tuple(surest[:MOST_SHOWN])), by_document


def _answers(reference: Answers, own: Answers) -> _Items:
    """Margins of the documents whose choices both models have scored."""
    rows = []
    for number, answer in own.by_document.items():
        theirs = reference.by_document.get(number)
        if theirs is not None and len(answer.scores) > 1 and len(theirs.scores) == len(answer.scores):
            best = theirs.scores.index(max(theirs.scores))
            is_other = answer.scores.index(max(answer.scores)) != best
            rows.append((number, _before(theirs.scores, best), _before(answer.scores, best), is_other))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 4
    return _Items(*(np.array(one, kind) for one, kind in zip(columns, (np.int64, float, float, bool), strict=True)))


def _before(scores: Sequence[float], best: int) -> float:
    """A choice's score less the best other one's; NaN where any has no number."""
    return scores[best] - float(np.max(np.delete(scores, best)))


def _tokens(both: Both, task: str) -> _Items:
    """Margins of the reference's most probable token at every scored position."""
    rows = both.observer.rows(task) if both.observer is not None else None
    if rows is None or not len(rows):
        return _Items(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0, np.bool_))
    reference, candidate = (rows[name].astype(np.float64) for name in ("reference_margins", "margins"))
    return _Items(rows["document"].astype(np.int64), reference, candidate, ~rows["same_top"])


def _task_margins(
    both: Both,
    reference: Answers,
    own: Answers,
    items: _Items,
    documents: _Items | None,
    differing: list[FirstDifference] | None,
) -> TaskMargins:
    weights = both.weight(own.task, items.documents)
    places: npt.NDArray[np.int64] = np.unique(items.documents, return_inverse=True)[1]
    shrink, low, high = shrink_factor(items.reference, items.candidate, places, weights)
    spread = noise(items.reference, items.candidate, shrink)
    is_answer = items is documents
    return TaskMargins(
        task=own.task,
        item="answer" if is_answer else "token",
        unit=own.unit if is_answer else "nats",
        num_documents=int(places.max()) + 1,
        num_items=len(items.documents),
        reference=float(np.median(items.reference)),
        candidate=float(np.median(items.candidate)),
        shrink=shrink,
        shrink_low=low,
        shrink_high=high,
        noise=spread,
        within_noise=float(np.average(shrink * items.reference < spread, weights=weights)),
        changed=int(items.changed.sum()),
        predicted=None if documents is None else _predicted(both, reference, own, documents),
        num_differing=None if differing is None else len(differing),
    )


def _predicted(both: Both, reference: Answers, own: Answers, documents: _Items) -> PredictedChanges | None:
    if len(documents.documents) < LEAST_DOCUMENTS or np.array_equal(documents.reference, documents.candidate):
        return None
    model = ChangeModel(documents.reference, documents.candidate, documents.changed)
    left = [item.scores for number, item in reference.by_document.items() if number not in own.by_document]
    known = np.array([_before(scores, scores.index(max(scores))) for scores in left if len(scores) > 1], np.float64)
    known = known[np.isfinite(known)]
    if len(known):
        return PredictedChanges("not run", len(known), *model.predict(known))
    counts = both.results.get("n-samples", {}).get(own.task, {})
    limited = int(counts.get("original") or 0) - int(counts.get("effective") or 0)
    number = limited if both.weights is None and limited > 0 else MORE
    what: Any = "left out by the limit" if number == limited else "more"
    return PredictedChanges(what, number, *model.predict(documents.reference, number))


def _fragile(both: Both, own: Answers, items: _Items, spread: float) -> list[FragileDocument]:
    """The documents of a task that have not changed, but nearly: the nearest first."""
    kept = np.flatnonzero(~items.changed)
    kept = kept[np.argsort(items.candidate[kept], kind="stable")][:MOST_SHOWN]
    lines = {int(line["doc_id"]): line for line in both.results["samples"][own.task] if line["filter"] == own.filter}
    shown = []
    for place in kept.tolist():
        number, task = int(items.documents[place]), both.tasks[own.task]
        if number not in lines:
            continue
        answer = own.by_document[number]
        ranks = np.argsort(np.negative(answer.scores), kind="stable").tolist()
        shown.append(
            FragileDocument(
                task=own.task,
                doc_id=number,
                question=question_of(task, lines[number]),
                answer=answer.text,
                other=choices_of(task, lines[number])[ranks[1]].strip() if len(ranks) > 1 else "",
                reference_margin=float(items.reference[place]),
                candidate_margin=float(items.candidate[place]),
                noise_share=float(items.candidate[place]) / spread if spread > 0 else math.inf,
            )
        )
    return shown


def _first_differences(both: Both, task: str, tokenizer: Any) -> list[FirstDifference] | None:
    """Where both models' greedy answers part, by document; None where nothing was generated."""
    if both.observer is None or both.reference_observer is None or tokenizer is None:
        return None
    theirs = both.reference_observer.greedy
    common = [asked for asked in both.observer.greedy if asked[0] == task and asked in theirs]
    found: dict[int, FirstDifference] = {}
    for asked in common:
        if (one := theirs[asked]) != (two := both.observer.greedy[asked]):
            found.setdefault(asked[1], _first_difference(both.observer, asked, one, two, tokenizer))
    return list(found.values()) if common else None


def _first_difference(
    observer: Observer, asked: Answered, reference: tuple[int, ...], candidate: tuple[int, ...], tokenizer: Any
) -> FirstDifference:
    pairs = zip(reference, candidate, strict=False)
    shortest = min(len(reference), len(candidate))
    index = next((place for place, (one, two) in enumerate(pairs) if one != two), shortest)
    before = tokenizer.decode(reference[:index]).rstrip("\ufffd")  # a character that has begun goes with what follows
    one, two = (_behind(before, tokens, index, tokenizer) for tokens in (reference, candidate))
    margins = observer.margins_at(asked, reference, index)
    return FirstDifference(asked[0], asked[1], index, before[-_AROUND:], one, two, *margins)


def _behind(before: str, tokens: tuple[int, ...], index: int, tokenizer: Any) -> str:
    """The text behind `before`, spaces at its beginning among it."""
    whole = str(tokenizer.decode(tokens))
    return (whole[len(before) :] if whole.startswith(before) else str(tokenizer.decode(tokens[index:])))[:_AROUND]
