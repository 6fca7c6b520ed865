"""Evaluates as many documents as make a claim certain, and adjusts the report's numbers to what these make certain.

The documents of all tasks are one population, with the reference's answers to all of them and how sure it was
(`Question`). Documents are drawn from it in batches, which lm-eval runs, until their values decide the claim. Drawn
documents have weights, by which they stand for all. Knows no mode of a reference and no kind of model.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.config import ClaimConfig, EvaluationConfig
from olive_ext.errors import RunError, TaskError, UnfitTaskError
from olive_ext.report.comparison import ACCURACY, ALL, ClaimResult, Comparison, Divergence, Outcome
from olive_ext.report.metrics import LENGTHS, Metric, read_metrics
from olive_ext.report.numbers import Z95
from olive_ext.run.reference.answers import Answers, check_same_questions, mean_metrics, primary_answers, read_answers
from olive_ext.run.reference.observer import Generated, Observer, Weights, score_generated
from olive_ext.stats.compared_fields import FloatArray
from olive_ext.stats.stopping import Claim, Population, Sampler, difference_population, mean_population

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks


Document: TypeAlias = tuple[str, int]
"""A task, and a document's number in it."""

Prompts: TypeAlias = Mapping[tuple[str, int, int], Sequence[str]]
"""The texts of requests, by task, document and request."""

CUT_NATS = 1.0
"""The most that a position's KL counts: without an upper limit, no upper limit of a mean is certain."""


@dataclass(frozen=True)
class ReferenceRun:
    """What is kept of lm-eval's run of the reference."""

    results: Mapping[str, Any]
    """lm-eval's results without the samples."""

    answers: list[Answers]
    observer: Observer | None
    """The engine's observer of the run; None for lm-eval's own models."""

    lost: Collection[Document] = ()
    """Documents with a request that has no answer."""

    prompts: Prompts = field(default_factory=dict)
    """Where each model is asked by its own files."""

    num_lost: int = 0
    """Requests that the reference alone could not answer."""

    non_finite: int = 0
    """Requests for which its output was not finite, where it ran alone."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Where it ran alone: `TRIALS`, and `tokens_fed`, which is 0 where records and kept generations held everything."""

    @property
    def generated(self) -> list[Generated]:
        """The generations that the engine saw; none of lm-eval's own models."""
        return [] if self.observer is None else self.observer.generated


@dataclass(frozen=True)
class Question:
    """`claim` about `documents`, which `population` numbers in this order."""

    documents: Sequence[Document]
    population: Population
    claim: Claim
    values: Callable[
        [Sequence[Document], Sequence[Answers], Collection[Document], Observer | None], Sequence[FloatArray]
    ]
    """Arguments of `Sampler.update` for some documents, in their order: from the candidate's answers to them, those
    with a request that has no answer, and all positions compared so far."""

    outcome: tuple[str, str, str] | None = None
    """Task, metric and filter of the `Outcome` that the claim is about; None where it is about positions."""

    cut: float | None = None
    """The most that a position counts, in nats; None where all of it does."""


def question_of(certain: ClaimConfig, reference: ReferenceRun) -> Question:
    """The question that `certain` asks of the documents that the reference has answered. Raises `TaskError` for a task
    that cannot be sampled for the metric."""
    if certain.metric == "accuracy_difference":
        return _accuracy(certain, reference.answers)
    if reference.observer is None:
        metric = f"'certain.metric' = '{certain.metric}'"
        raise UnfitTaskError(f"{metric}: distributions are compared on this package's engine only")
    return _positions(certain, reference, reference.observer)


def refuse_unanswerable(certain: ClaimConfig, tasks: LoadedTasks) -> None:
    """Raises `TaskError` for a task of which `certain` cannot be asked, whatever the reference answers."""
    if certain.metric == "accuracy_difference":
        for name, task in tasks.tasks.items():
            known = {metric for metric, better in mean_metrics(task).items() if better is not None}
            _refuse_without_answers([] if known - {*LENGTHS} else [name])


def _refuse_without_answers(tasks: Iterable[str]) -> None:
    for task in tasks:
        problem = (
            f"task '{task}' has no right answers (metrics with 'higher_is_better'): give 'certain.metric' = 'kl_mean'"
        )
        raise TaskError(problem, "documents", "enough")


def _accuracy(certain: ClaimConfig, answers: Sequence[Answers]) -> Question:
    """The difference of the shares of right answers, by each task's primary metric."""
    firsts = primary_answers(answers)
    _refuse_without_answers(item.task for item in answers if item.task not in firsts)
    documents = [(item.task, number) for item, _ in firsts.values() for number in item.by_document]
    right = [item.right(metric) for item, metric in firsts.values()]
    sureness = [_ranks(item, values) for (item, _), values in zip(firsts.values(), right, strict=True)]
    known = dict(zip(documents, np.concatenate(right).tolist(), strict=True))

    def values(batch: Sequence[Document], batch_answers: Sequence[Answers], *_: object) -> Sequence[FloatArray]:
        right_answers: dict[Document, float] = {}
        for own in batch_answers:
            reference, metric = firsts[own.task]
            if own.filter == reference.filter:
                check_same_questions(reference.of(own.by_document), own)
                answered = replace(own, metrics=reference.metrics).right(metric).tolist()
                right_answers |= zip(((own.task, number) for number in own.by_document), answered, strict=True)
        for (task, number), value in right_answers.items():  # else the report's accuracy were another metric
            if value not in (0, 1) and not math.isnan(value):
                problem = f"task '{task}', document {number}: {value:g} is not right or wrong: give 'all'"
                raise TaskError(problem, "documents", "enough")
        return [np.array([right_answers.get(one, math.nan) - known[one] for one in batch], np.float64)]

    (first, metric), *others = firsts.values()
    outcome = (ALL, ACCURACY, "none") if others else (first.task, metric, first.filter)
    population = difference_population(np.concatenate(right), np.concatenate(sureness))
    claim = Claim(certain.bound, certain.side, certain.distance, certain.confidence)
    return Question(documents, population, claim, values, outcome)


def _ranks(answers: Answers, right: FloatArray) -> FloatArray:
    """How sure the reference is of each answer, as a rank from 0 to 1 among the task's right or wrong answers, because
    units differ between tasks. One half where margins are not known."""
    margins = [answer.margin for answer in answers.by_document.values()]
    ranks = np.full(len(right), 0.5)
    if None in margins:
        return ranks
    for side in (0.0, 1.0):
        (members,) = np.nonzero(right == side)
        order = np.argsort(np.argsort(np.array(margins, np.float64)[members], kind="stable"))
        ranks[members] = order / max(1, len(members))
    return ranks


def _positions(certain: ClaimConfig, reference: ReferenceRun, observer: Observer) -> Question:
    """A mean over the scored targets, where documents are the clusters; the reference's `observer` has counted them.
    Agreement is asked as disagreement."""
    asked = dict.fromkeys((item.task, number) for item in reference.answers for number in item.by_document)
    documents = [document for document in asked if document not in reference.lost]
    counts = dict.fromkeys(asked, 0)
    sureness = []
    for item in reference.generated:
        counts[item.task_name, item.doc_id] += len(item.target.target)
    for document in documents:
        number, total = observer.targets_of(*document)
        counts[document] += number
        sureness.append(total / number if number else 0.0)
    if not any(counts.values()):
        raise TaskError("the tasks gave no targets to compare", "certain.metric", certain.metric)
    is_kl = certain.metric == "kl_mean"
    highest = max(CUT_NATS, 4 * certain.bound) if is_kl else 1.0
    population = mean_population([counts[document] for document in documents], highest, sureness)
    bound = certain.bound if is_kl else 1 - certain.bound
    other: Any = {"above": "below", "below": "above"}
    side = certain.side if is_kl else other[certain.side]

    def values(
        batch: Sequence[Document], _: object, batch_lost: Collection[Document], candidate: Observer | None
    ) -> Sequence[FloatArray]:
        """The mean of each document's positions, a lower bound of the true mean, and the variance that comes from
        keeping a part of the reference's distributions; no numbers for a lost document."""
        assert candidate is not None
        means: dict[Document, tuple[float, float, float]] = {}
        for task in dict.fromkeys(task for task, _ in batch):
            rows = candidate.rows(task)
            disagreement = 1.0 - rows["same_top"]
            exact = np.array([disagreement, disagreement, rows["kl_variance"] * 0])
            positions = _kl(rows, highest) if is_kl else exact
            numbers, indices, sizes = np.unique(rows["document"], return_inverse=True, return_counts=True)
            values, lows, variances = (np.bincount(indices, weights=column) / sizes for column in positions)
            ends = np.clip(values, 0, highest), np.clip(lows, 0, highest), variances / sizes
            scored = dict(zip(numbers.tolist(), sizes.tolist(), strict=True))
            for one, number in batch:
                if one == task and (task, number) not in batch_lost and counts[task, number] != scored.get(number, 0):
                    known = f"not the {counts[task, number]} targets of the reference"
                    raise RunError(f"task '{task}', document {number}: {known}")
            of_documents = zip(*(end.tolist() for end in ends), strict=True)
            means |= zip(((task, number) for number in scored), of_documents, strict=True)
        unknown = math.nan, math.nan, 0.0
        known_means = [unknown if one in batch_lost else means.get(one, unknown) for one in batch]
        return list(np.array(known_means, np.float64).reshape(-1, 3).T)

    claim = Claim(bound, side, certain.distance, certain.confidence)
    return Question(documents, population, claim, values, cut=highest if is_kl else None)


def _kl(rows: npt.NDArray[Any], highest: float) -> FloatArray:
    """Each position's KL, cut at `highest`, with its lower bound and its variance. An estimate within two standard
    errors of the cut counts as the cut: simply cut, it would be too small on average."""
    values, lows, variances = (rows[name].astype(np.float64) for name in ("kl", "kl_lower", "kl_variance"))
    errors = np.sqrt(variances)
    cut = np.where((errors > 0) & (values + 2 * errors > highest), highest, np.minimum(values, highest))
    return np.array([cut, np.minimum(lows, highest), variances])


def run_sampled(
    lm: LM,
    observer: Observer | None,
    tasks: LoadedTasks,
    reference: ReferenceRun,
    config: EvaluationConfig,
    *,
    progress: bool,
) -> tuple[dict[str, Any], Weights, ClaimResult]:
    """lm-eval's results over the documents drawn, with samples; these documents; and what they make certain of the
    configuration's claim.

    The same seed and reference draw the same first batch for all candidates. `observer` sees the model's positions.
    """
    from olive_ext.backends.lm_eval_run import AnsweredRequests, run_tasks

    question = question_of(config.claim, reference)
    sampler = Sampler(question.population, question.claim, config.seed or 0)
    samples: dict[str, list[Any]] = defaultdict(list)
    quick = config.model_copy(update={"bootstrap_iters": 0})
    while not samples or sampler.asks:
        documents = [question.documents[index] for index in sampler.next_batch().tolist()]
        by_task: dict[str, list[int]] = defaultdict(list)
        for task, number in documents:
            by_task[task].append(number)
        batch = run_tasks(lm, tasks.of(by_task), quick, progress=progress)["samples"]
        lm.says_work = False  # a line for the first batch alone
        if observer is not None:
            wanted = {*documents}
            drawn = [item for item in reference.generated if (item.task_name, item.doc_id) in wanted]
            score_generated(lm, drawn, observer)
        answers = read_answers(batch, tasks.tasks)
        sampler.update(*question.values(documents, answers, lost_documents(lm), observer))
        for task, lines in batch.items():
            samples[task] += lines
    lm.says_work = True
    weights: dict[str, dict[int, float]] = defaultdict(dict)
    for index, weight in sampler.representation().items():
        task, number = question.documents[index]
        weights[task][number] = weight
    results = run_tasks(AnsweredRequests(lm, samples), tasks.of(weights), config, progress=progress)
    cut = question.cut
    beyond_cut = 0.0 if cut is None or observer is None else observer.beyond(cut, weights)
    numbers = repr([(task, sorted(weights[task])) for task in sorted(weights)])
    facts: dict[str, Any] = {name: getattr(config.claim, name) for name in ("metric", "side", "bound", "confidence")}
    facts |= sampler.decision()
    if config.claim.metric == "top1_agreement":  # asked as disagreement
        facts |= {"estimate": 1 - facts["estimate"], "low": 1 - facts["high"], "high": 1 - facts["low"]}
    facts |= {"outcome": question.outcome, "cut": cut, "beyond_cut": beyond_cut}
    certainty = ClaimResult(**facts, sample=hashlib.sha256(numbers.encode()).hexdigest()[:16])
    return results, weights, certainty


def lost_documents(lm: Any) -> set[Document]:
    """The documents with a request that `lm` left without an answer."""
    return {(item.task, item.doc_id) for item in getattr(lm, "lost", ())}


_SAME = 1e-9


def certain_comparison(comparison: Comparison, certainty: ClaimResult) -> Comparison:
    """The comparison with its claim. The outcome that the claim is about gets the estimate and the interval that
    decided; other numbers stay as measured. Divergences state how many documents they are about."""
    counts: dict[str, int | None] = {item.task: item.num_population for item in comparison.outcomes}
    counts |= {metric.task: metric.n for metric in read_metrics(comparison.metrics) if metric.n is not None}
    counts[ALL] = certainty.num_documents
    outcomes = [_decided(item, certainty) for item in comparison.outcomes]
    divergences = [replace(item, num_population=counts.get(item.task)) for item in comparison.divergences]
    if (whole := comparison.overall_divergence()) is not None:
        index = comparison.divergences.index(whole)
        divergences[index] = _held(divergences[index], certainty)
    return replace(comparison, outcomes=tuple(outcomes), divergences=tuple(divergences), certainty=certainty)


def _decided(outcome: Outcome, certainty: ClaimResult) -> Outcome:
    """The outcome with the claim's interval, extended on both sides by the error of all documents, because a task's
    documents are a sample, too. The outcome of all documents has that error already."""
    if certainty.outcome != outcome.key or outcome.num_population is None:
        return outcome
    sign, total = 1 if outcome.higher_is_better else -1, certainty.num_documents
    flipped = (outcome.right_to_wrong + outcome.wrong_to_right) / outcome.num_documents
    margin = max(Z95 * math.sqrt(flipped / total), 1 - 0.025 ** (1 / total))
    low, high = sorted((sign * certainty.low, sign * certainty.high))
    difference = sign * _beyond(certainty.estimate, certainty)
    return replace(
        outcome,
        candidate=outcome.reference + difference,
        difference=difference,
        low=max(low - margin, -1.0),
        high=min(high + margin, 1.0),
    )


def _held(overall: Divergence, certainty: ClaimResult) -> Divergence:
    """The mean as measured; where the claim is broken, at least beyond the bound, which the weighted mean may just
    miss. A kept claim changes nothing: it may be about cut positions, while a bound is about all."""
    if certainty.metric == "top1_agreement" and not certainty.is_above:
        return replace(overall, top1_agreement=_beyond(overall.top1_agreement, certainty))
    if certainty.metric == "kl_mean" and certainty.is_above:
        return replace(overall, kl=replace(overall.kl, mean=_beyond(overall.kl.mean, certainty)))
    return overall


def _beyond(value: float, certainty: ClaimResult) -> float:
    """`value`, or the nearest that certainly breaks the bound."""
    if certainty.verdict != "loss" or math.isnan(value):
        return value
    sign = 1 if certainty.is_above else -1
    return sign * max(sign * value, sign * certainty.bound + _SAME)


def sampled_metrics(
    metrics: Sequence[Metric], comparison: Comparison, results: Mapping[str, Any]
) -> tuple[Metric, ...]:
    """lm-eval's `metrics` of drawn documents: means over documents become estimates for all of the task or group;
    others stay, with the number of documents that they leave out. `results` are lm-eval's. Without a claim, `metrics`
    unchanged."""
    if comparison.certainty is None:
        return tuple(metrics)
    whole = {metric.key: metric for metric in read_metrics(comparison.metrics)}
    outcomes = {item.key: item for item in comparison.outcomes}
    groups: Mapping[str, Sequence[str]] = results.get("group_subtasks", {})
    estimates = []
    for metric in metrics:
        reference = whole.get(metric.key)
        if metric.n is None or reference is None:
            estimates.append(metric)
            continue
        sampled = replace(metric, num_population=reference.n, is_estimate=False)
        tasks = [metric.task]
        for task in tasks:  # grows by the members of groups
            tasks += groups.get(task, ())
        keys = [(task, *metric.key[1:]) for task in tasks if not groups.get(task)]
        estimates.append(_estimated(sampled, reference, [outcomes[key] for key in keys if key in outcomes]))
    return tuple(estimates)


def _estimated(metric: Metric, reference: Metric, outcomes: Sequence[Outcome]) -> Metric:
    """The reference's value of all documents plus the difference, where that value is the mean over all documents of
    `outcomes`: not so of a group that weighs its tasks alike, nor where nothing was drawn of some task."""
    counts = [item.num_population or item.num_documents for item in outcomes]
    total = sum(counts)
    if not total or total != reference.n:
        return metric
    mean = math.fsum(count * item.reference for count, item in zip(counts, outcomes, strict=True)) / total
    if abs(mean - reference.value) > _SAME:
        return metric
    pairs = list(zip(counts, outcomes, strict=True))
    difference = math.fsum(count * item.difference for count, item in pairs) / total
    half_widths = [count / total * (item.high - item.low) / 2 for count, item in pairs]
    stderr = math.sqrt(math.fsum(width**2 for width in half_widths)) / Z95
    return replace(metric, value=reference.value + difference, stderr=stderr, is_estimate=True)
