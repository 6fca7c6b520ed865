"""Pairs both models' answers to the same documents: outcomes of every metric, and the documents that flip.

Knows no model; the statistics are of `olive_ext.stats.paired_answers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.report.comparison import ALL, Flip, Outcome
from olive_ext.run.reference.answers import Answers, check_same_questions, question_of, target_of
from olive_ext.stats.paired_answers import compare_outcomes

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Pair:
    """One metric of one task: both models' values [D] for `documents`."""

    reference: Answers
    candidate: Answers
    metric: str
    documents: Sequence[int]
    reference_values: FloatArray
    candidate_values: FloatArray

    @property
    def higher_is_better(self) -> bool:
        return self.candidate.metrics[self.metric]

    def outcome(self) -> Outcome:
        return compare_outcomes(
            self.candidate.task,
            self.metric,
            self.candidate.filter,
            self.reference_values,
            self.candidate_values,
            higher_is_better=self.higher_is_better,
        )


def compare_answers(
    reference: Sequence[Answers], candidate: Sequence[Answers], samples: Mapping[str, Any], tasks: Mapping[str, Any]
) -> tuple[tuple[Outcome, ...], tuple[Flip, ...]]:
    """Outcomes of each task, metric and filter, the one over all tasks where there are several, and the flips of each
    task's first metric that is right or wrong. `samples` are the candidate's, `tasks` lm-eval's objects by name.

    Raises `TaskError` where the prompts of the two runs differ.
    """
    pairs = list(_pairs(reference, candidate))
    outcomes = [pair.outcome() for pair in pairs]
    firsts: dict[str, _Pair] = {}
    for pair, outcome in zip(pairs, outcomes, strict=True):
        if outcome.is_binary:
            firsts.setdefault(outcome.task, pair)
    if len(firsts) > 1:
        outcomes.append(_over_all(list(firsts.values())))
    flips = [flip for pair in firsts.values() for flip in _flips(pair, samples[pair.candidate.task], tasks)]
    return tuple(outcomes), tuple(flips)


def _pairs(reference: Sequence[Answers], candidate: Sequence[Answers]) -> Iterator[_Pair]:
    theirs = {(item.task, item.filter): item for item in reference}
    for own in candidate:
        other = theirs[own.task, own.filter]
        check_same_questions(other, own)
        first, second = other.by_document, own.by_document
        for metric in own.metrics:
            numbers = [item for item in second if metric in first[item].values and metric in second[item].values]
            if numbers:
                values = (np.array([answers[item].values[metric] for item in numbers]) for answers in (first, second))
                yield _Pair(other, own, metric, numbers, *values)


def _over_all(pairs: Sequence[_Pair]) -> Outcome:
    """The outcome over all documents, of which a right answer counts 1 whichever direction its task's metric has."""
    first = [_right(pair.reference_values, pair) for pair in pairs]
    second = [_right(pair.candidate_values, pair) for pair in pairs]
    return compare_outcomes(ALL, "accuracy", "none", np.concatenate(first), np.concatenate(second))


def _right(values: FloatArray, pair: _Pair) -> FloatArray:
    return values if pair.higher_is_better else 1 - values


def _flips(pair: _Pair, samples: Sequence[Mapping[str, Any]], tasks: Mapping[str, Any]) -> Iterator[Flip]:
    task, filter_name = pair.candidate.task, pair.candidate.filter
    flipped = {
        number: one > two if pair.higher_is_better else one < two
        for number, one, two in zip(pair.documents, pair.reference_values, pair.candidate_values, strict=True)
        if one != two
    }
    for sample in samples:
        number = int(sample["doc_id"])
        if number in flipped and sample["filter"] == filter_name:
            yield Flip(
                task=task,
                doc_id=number,
                direction="right_to_wrong" if flipped[number] else "wrong_to_right",
                question=question_of(tasks[task], sample),
                target=target_of(tasks[task], sample),
                reference_answer=pair.reference.by_document[number].text,
                candidate_answer=pair.candidate.by_document[number].text,
                metric=pair.metric,
                filter=filter_name,
            )
