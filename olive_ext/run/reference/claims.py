"""What is drawn and what is claimed: the documents of all tasks as one population, with the reference's answers and how
sure it was of them; and what a batch of the candidate's answers says. Knows no model and no lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.config import Certain
from olive_ext.errors import RunError, TaskError
from olive_ext.run.reference.answers import Answers, check_same_questions
from olive_ext.run.reference.observer import Generated, Observer
from olive_ext.stats.sampling_design import Population, difference_population, mean_population
from olive_ext.stats.stopping import Claim

FloatArray: TypeAlias = npt.NDArray[np.float64]

Document: TypeAlias = tuple[str, int]
"""A task, and a document's number in it."""

CUT_NATS = 1.0
"""Of a position's KL no more counts: without an upper limit no upper limit of a mean is certain."""


@dataclass(frozen=True)
class Batch:
    """What the candidate said to some documents: its answers to them, and all positions compared so far."""

    documents: Sequence[Document]
    answers: Sequence[Answers]
    observer: Observer | None


@dataclass(frozen=True)
class Question:
    """`claim` about `documents`, which `population` numbers in this order; `values` reads a batch's, in its order."""

    documents: Sequence[Document]
    population: Population
    claim: Claim
    values: Callable[[Batch], FloatArray]


def question_of(
    certain: Certain, answers: Sequence[Answers], observer: Observer | None, generated: Sequence[Generated]
) -> Question:
    """The question that `certain` asks of the documents that the reference has answered; `observer` has counted its
    targets, and `generated` are its generations.

    Raises `TaskError` for a task that cannot be sampled for the metric.
    """
    if certain.metric == "accuracy_difference":
        return _accuracy(certain, answers)
    if observer is None:
        raise TaskError(
            f"'certain.metric' = '{certain.metric}': distributions are compared on this package's engine only"
        )
    return _positions(certain, answers, observer, generated)


def _accuracy(certain: Certain, answers: Sequence[Answers]) -> Question:
    """The difference of the shares of right answers: of each task by its first metric that is right or wrong."""
    firsts = _first_binary(answers)
    documents = [(item.task, number) for item, _ in firsts.values() for number in item.by_document]
    right = [item.right(metric) for item, metric in firsts.values()]
    sureness = [_ranks(item, values) for (item, _), values in zip(firsts.values(), right, strict=True)]
    known = dict(zip(documents, np.concatenate(right).tolist(), strict=True))

    def values(batch: Batch) -> FloatArray:
        found: dict[Document, float] = {}
        for own in batch.answers:
            reference, metric = firsts[own.task]
            if own.filter == reference.filter:
                check_same_questions(reference.of(own.by_document), own)
                pairs = zip(own.by_document, own.right(metric).tolist(), strict=True)
                found |= {(own.task, number): value for number, value in pairs}
        return np.array([found[document] - known[document] for document in batch.documents], np.float64)

    population = difference_population(np.concatenate(right), np.concatenate(sureness))
    return Question(documents, population, _claim(certain, certain.bound, certain.side), values)


def _first_binary(answers: Sequence[Answers]) -> dict[str, tuple[Answers, str]]:
    found: dict[str, tuple[Answers, str]] = {}
    for item in answers:
        if item.task not in found and (metric := item.first_binary()) is not None:
            found[item.task] = item, metric
    without = [item.task for item in answers if item.task not in found]
    if without:
        raise TaskError(
            f"'documents' = 'enough': task '{without[0]}' has no answers that are right or wrong, so "
            "'accuracy_difference' cannot be sampled: evaluate it by itself, or give 'certain.metric' = 'kl_mean' or "
            "'top1_agreement'"
        )
    return found


def _ranks(answers: Answers, right: FloatArray) -> FloatArray:
    """How sure the reference is of each answer, from 0 to 1 among the task's right or wrong ones: units differ between
    tasks. One half where margins are not known."""
    margins = [answer.margin for answer in answers.by_document.values()]
    ranks = np.full(len(right), 0.5)
    if None in margins:
        return ranks
    for side in (0.0, 1.0):
        (members,) = np.nonzero(right == side)
        order = np.argsort(np.argsort(np.array(margins, np.float64)[members], kind="stable"))
        ranks[members] = order / max(1, len(members))
    return ranks


def _positions(
    certain: Certain, answers: Sequence[Answers], observer: Observer, generated: Sequence[Generated]
) -> Question:
    """A mean over the scored targets; documents are the clusters. Agreement is asked as disagreement."""
    documents = list(dict.fromkeys((item.task, number) for item in answers for number in item.by_document))
    counts = dict.fromkeys(documents, 0)
    sureness = []
    for item in generated:
        counts[item.task_name, item.doc_id] += len(item.target.target)
    for document in documents:
        number, total = observer.targets_of(*document)
        counts[document] += number
        sureness.append(total / number if number else 0.0)
    if not any(counts.values()):
        raise TaskError(f"'certain.metric' = '{certain.metric}': the tasks gave no targets to compare")
    is_kl = certain.metric == "kl_mean"
    highest = max(CUT_NATS, 4 * certain.bound) if is_kl else 1.0
    population = mean_population(list(counts.values()), highest, sureness)
    bound = certain.bound if is_kl else 1 - certain.bound
    side = certain.side if is_kl else _OTHER[certain.side]

    def values(batch: Batch) -> FloatArray:
        assert batch.observer is not None
        means = _document_means(batch, certain.metric, highest, counts)
        return np.array([means[document] for document in batch.documents], np.float64)

    return Question(documents, population, _claim(certain, bound, side), values)


_OTHER: Mapping[Any, Any] = {"above": "below", "below": "above"}


def _document_means(batch: Batch, metric: str, highest: float, counts: Mapping[Document, int]) -> dict[Document, float]:
    """Mean of each document's positions; an estimated KL may be below zero, and counts 0 then."""
    assert batch.observer is not None
    found: dict[Document, float] = {}
    for task in dict.fromkeys(task for task, _ in batch.documents):
        rows = batch.observer.rows(task)
        values = rows["kl"].astype(np.float64) if metric == "kl_mean" else 1.0 - rows["same_top"]
        numbers, places, sizes = np.unique(rows["document"], return_inverse=True, return_counts=True)
        means = np.clip(np.bincount(places, weights=np.minimum(values, highest)) / sizes, 0, highest)
        found |= {(task, int(number)): mean for number, mean in zip(numbers, means.tolist(), strict=True)}
        wrong = [n for n, size in zip(numbers.tolist(), sizes.tolist(), strict=True) if counts[task, n] != size]
        if wrong:
            raise RunError(
                f"task '{task}', document {wrong[0]}: the reference scored {counts[task, wrong[0]]} targets and the "
                "model another number: its prompts change from run to run"
            )
    return found


def _claim(certain: Certain, bound: float, side: Any) -> Claim:
    return Claim(bound, side, certain.distance, certain.confidence)
