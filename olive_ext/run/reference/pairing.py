"""Two models' answers to the same documents: outcomes of every metric, and the documents that flip. Knows no model and
no session; the statistics are of `olive_ext.stats.paired_answers`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from olive_ext.errors import ANY_FAILURE, first_line
from olive_ext.media.pictures import thumbnail
from olive_ext.report.comparison import ACCURACY, ALL, Comparison, Flip, Outcome, TextChange, primary_outcomes
from olive_ext.report.metrics import GENERATED_TOKENS, LENGTHS
from olive_ext.run.reference.answers import (
    ITEMS,
    NATS,
    UNITS,
    WER,
    WORDS,
    Answers,
    check_same_questions,
    is_value,
    primary_answers,
    question_of,
    target_of,
)
from olive_ext.run.reference.observer import Weights
from olive_ext.stats.compared_fields import FloatArray
from olive_ext.stats.distances import degrees_of_freedom, perplexity_ratio
from olive_ext.stats.paired_answers import compare_outcomes, flips

logger = logging.getLogger(__name__)

MOST_THUMBNAILS = 4
"""The most thumbnails of one document."""


@dataclass(frozen=True)
class _Pair:
    """One metric of one task: both models' values [D] for `documents`."""

    reference: Answers
    candidate: Answers
    metric: str
    documents: Sequence[int]
    reference_values: FloatArray
    candidate_values: FloatArray
    weights: Sequence[float] | None
    """How many documents each one stands for; None where all were asked."""

    @property
    def higher_is_better(self) -> bool | None:
        return self.candidate.metrics[self.metric]

    @property
    def whole(self) -> FloatArray:
        """The reference's values of all documents, the drawn ones among them."""
        answers = self.reference.by_document.values()
        return np.array([item.values[self.metric] for item in answers if self.metric in item.values])

    def outcome(self, matters: float) -> Outcome:
        names, better = (self.candidate.task, self.metric, self.candidate.filter), self.higher_is_better
        both, drawn = (self.reference_values, self.candidate_values), self.weights
        return compare_outcomes(*names, *both, better, matters, whole=self.whole, weights=drawn)

    def right(self, values: FloatArray) -> FloatArray:
        """The values, where 1 is right."""
        return values if self.higher_is_better else 1 - values


def compare_answers(
    comparison: Comparison,
    reference: Sequence[Answers],
    candidate: Sequence[Answers],
    samples: Mapping[str, Any] = MappingProxyType({}),
    tasks: Mapping[str, Any] = MappingProxyType({}),
    weights: Weights | None = None,
    *,
    has_same_prompts: bool = True,
) -> Comparison:
    """The comparison with outcomes of each task, metric and filter, the one over all tasks where there are several, the
    flips of each task's primary metric (`primary_outcomes`), and the outcomes of answers' lengths, apart. `samples` are
    the candidate's, which give flips their texts, `tasks` lm-eval's objects by name. Where the candidate answered drawn
    documents alone, `weights` say how many documents each one stands for. Raises `TaskError` where the prompts of the
    two runs differ but for those that `has_same_prompts` allows. Of answers that are not separated from their reasoning
    only the share that is cut off is known: its outcome is given where it certainly (exact p below 5 %) changed.
    """
    matters, scores = comparison.matters, comparison.metrics.get("results", {})
    theirs = {(item.task, item.filter): item for item in reference}
    for ours in candidate:
        first = theirs[ours.task, ours.filter]
        asked_alike = first if weights is None else first.of(ours.by_document)
        config = comparison.metrics.get("configs", {}).get(ours.task, {})
        check_same_questions(asked_alike, ours, config, has_same_prompts=has_same_prompts)
    every = [*_pairs(theirs, candidate, weights)]
    pairs = [pair for pair in every if pair.metric not in LENGTHS]
    thinking = {pair.candidate.task for pair in every if pair.metric == GENERATED_TOKENS}
    measured: dict[tuple[str, str], Outcome] = {}
    for pair in every:
        if pair.metric in LENGTHS and (pair.candidate.task, pair.metric) not in measured:
            measured[pair.candidate.task, pair.metric] = pair.outcome(matters)
    lengths = [item for item in measured.values() if item.task in thinking or not item.low <= 0 <= item.high]
    outcomes = [pair.outcome(matters) for pair in pairs]
    spoken = primary_outcomes(outcomes).values()
    firsts = {item.task: pair for pair, item in zip(pairs, outcomes, strict=True) if item in spoken}
    asked = {item.task for item in (reference if weights is None else candidate)}
    undrawn = [item.right(name) for task, (item, name) in primary_answers(reference).items() if task not in asked]
    if firsts and len(firsts) + len(undrawn) > 1:
        silent = {item.task for item in spoken if item.is_silent and weights is None}
        heard = [pair for task, pair in firsts.items() if task not in silent]  # nothing can be lost in others
        outcomes.append(_over_all(heard or [*firsts.values()], undrawn, matters))
    outcomes += [] if weights is not None else _equal_scores(reference, candidate, scores, matters)
    flips = [flip for pair in firsts.values() for flip in _flips(pair, samples.get(pair.candidate.task, ()), tasks)]
    ends = tuple(replace(item, documents_needed={}, is_binary=False) for item in lengths)
    return replace(comparison, outcomes=tuple(outcomes), flips=tuple(flips), lengths=ends)


def _equal_scores(
    reference: Sequence[Answers], candidate: Sequence[Answers], scores: Mapping[str, Any], matters: float
) -> Iterator[Outcome]:
    """Outcomes of the scores of whole tasks to which each document adds the same in both runs: nothing was lost, and as
    much may be as of so many values by document that are all the same."""
    theirs = {(item.task, item.filter): item.by_document for item in reference}
    for own in candidate:
        first = theirs[own.task, own.filter]
        pairs = [(first[number].values, answer.values) for number, answer in own.by_document.items()]
        for name in sorted({name for _, values in pairs for name in values if name.startswith(ITEMS)}):
            metric = name.removeprefix(ITEMS)
            score = scores.get(own.task, {}).get(f"{metric},{own.filter}")
            if is_value(score) and all(one.get(name) == two.get(name) for one, two in pairs):
                equal = np.full(len(pairs), score)
                outcome = compare_outcomes(own.task, metric, own.filter, equal, equal, matters=matters)
                yield replace(outcome, is_binary=False)


def compare_texts(reference: Sequence[Answers], candidate: Sequence[Answers]) -> Iterator[TextChange]:
    """The change of the perplexity of each task of whole texts, over the documents that have a value in both."""
    theirs = {item.task: item for item in reference}
    for own in candidate:
        first, second = theirs[own.task].by_document, own.by_document
        both = [item for item in second if item in first]
        numbers = [item for item in both if UNITS in first[item].values and UNITS in second[item].values]
        if own.text_metric and numbers:
            units = np.array([second[item].values[UNITS] for item in numbers])
            sums = [np.array([answers[item].values[NATS] for item in numbers]) for answers in (first, second)]
            ratio = perplexity_ratio(sums[0] / units, sums[1] / units, np.arange(len(numbers)), units)
            yield TextChange(own.task, own.text_metric, len(numbers), *ratio, degrees_of_freedom(units))


def without_value(reference: Sequence[Answers], candidate: Sequence[Answers]) -> dict[tuple[str, int], str]:
    """The documents, by task and number, whose reference answer has a value of a metric while the other answer has
    none, with that metric: a task's own code gives none to an answer that it cannot read."""
    theirs = {(item.task, item.filter): item.by_document for item in reference}
    return {
        (own.task, number): min(lacking)
        for own in candidate
        for number, answer in own.by_document.items()
        if (lacking := theirs[own.task, own.filter][number].values.keys() - answer.values.keys() - {*LENGTHS})
    }


def _pairs(
    theirs: Mapping[tuple[str, str], Answers], candidate: Sequence[Answers], weights: Weights | None
) -> Iterator[_Pair]:
    for ours in candidate:
        reference_answers = theirs[ours.task, ours.filter]
        first, second = reference_answers.by_document, ours.by_document
        for metric in ours.metrics:
            numbers = [item for item in second if metric in first[item].values and metric in second[item].values]
            if numbers:
                before, after = (np.array([by[item].values[metric] for item in numbers]) for by in (first, second))
                if metric == WER:  # of other documents beside these the average one may have other words
                    after *= [second[item].values.get(WORDS, 1) / first[item].values.get(WORDS, 1) for item in numbers]
                drawn = None if weights is None else [weights[ours.task][number] for number in numbers]
                yield _Pair(reference_answers, ours, metric, numbers, before, after, drawn)


def _over_all(pairs: Sequence[_Pair], undrawn: Sequence[FloatArray], matters: float) -> Outcome:
    """The outcome over all documents, with the documents of `undrawn` tasks. A right answer always counts 1."""
    first = np.concatenate([pair.right(pair.reference_values) for pair in pairs])
    second = np.concatenate([pair.right(pair.candidate_values) for pair in pairs])
    drawn = [weight for pair in pairs for weight in pair.weights or ()]
    if not drawn:  # a document that several tasks ask, alike or by other prompts, is one: the mean of its answers
        places: dict[str, int] = {}
        asked = [pair.candidate.by_document[number].digest.split(" ")[0] for pair in pairs for number in pair.documents]
        at = [places.setdefault(document, len(places)) for document in asked]
        first, second = (np.bincount(at, values) / np.bincount(at) for values in (first, second))
    whole = np.concatenate([*(pair.right(pair.whole) for pair in pairs), *undrawn])
    outcome = compare_outcomes(ALL, ACCURACY, "none", first, second, True, matters, whole=whole, weights=drawn or None)
    lost, won = flips(first, second)
    return replace(outcome, is_binary=True, right_to_wrong=lost, wrong_to_right=won)


def _flips(pair: _Pair, samples: Sequence[Mapping[str, Any]], tasks: Mapping[str, Any]) -> Iterator[Flip]:
    task, filter_name = pair.candidate.task, pair.candidate.filter
    both = pair.right(pair.reference_values), pair.right(pair.candidate_values)
    lines = {int(line["doc_id"]): line for line in samples if line["filter"] == filter_name}
    for number, before, after in zip(pair.documents, *both, strict=True):
        if before == after:
            continue
        line, object_of_task = lines.get(number), tasks.get(task)
        yield Flip(
            task=task,
            doc_id=number,
            direction="right_to_wrong" if before > after else "wrong_to_right",
            question="" if line is None else question_of(object_of_task, line),
            target="" if line is None else target_of(object_of_task, line),
            reference_answer=pair.reference.by_document[number].text,
            candidate_answer=pair.candidate.by_document[number].text,
            metric=pair.metric,
            filter=filter_name,
            pictures=thumbnails_of(object_of_task, number),
        )


def thumbnails_of(task: Any, doc_id: int) -> tuple[str, ...]:
    """Data URLs of the first pictures of a task's document; empty where it has none, or the task's code gives none. (A
    sample has digests in place of pictures.)"""
    if getattr(getattr(task, "config", None), "doc_to_image", None) is None:
        return ()
    try:
        pictures = task.doc_to_image(task.eval_docs[doc_id])
        listed = pictures if isinstance(pictures, list | tuple) else [pictures]
        return tuple(map(thumbnail, listed[:MOST_THUMBNAILS]))
    except ANY_FAILURE as error:  # whatever a task's code throws: the numbers may have taken hours
        logger.warning("no thumbnails of document %d: %s", doc_id, first_line(error))
        return ()
