"""Evaluates as many documents as make a claim certain: draws, batches of lm-eval, and the weights of what was drawn.

The reference has answered all documents before. Knows no mode of a reference and no kind of model.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from olive_ext.config import Certain, EvaluationConfig
from olive_ext.report.comparison import Certainty
from olive_ext.run.reference.answers import read_answers
from olive_ext.run.reference.claims import BatchAnswers, Document, Question
from olive_ext.run.reference.observer import Generated, Observer, Weights, score_generated
from olive_ext.stats.stopping import ClaimDecision, Sampler

if TYPE_CHECKING:
    from olive_ext.backends.chosen_documents import ChosenDocuments
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks, Seeds


@dataclass(frozen=True)
class Drawn:
    """The documents that were drawn, and what they make certain."""

    weights: Weights
    certainty: Certainty


@dataclass(frozen=True)
class SampledRun:
    """One candidate's run over drawn documents; the same seed and reference draw the same first batch for all."""

    config: EvaluationConfig
    tasks: LoadedTasks
    seeds: Seeds
    question: Question
    generated: Sequence[Generated]
    progress: bool

    @cached_property
    def _chosen(self) -> ChosenDocuments:
        from olive_ext.backends.chosen_documents import ChosenDocuments

        return ChosenDocuments(self.tasks)

    def run(self, lm: LM, observer: Observer | None) -> tuple[dict[str, Any], Drawn]:
        """lm-eval's results over the documents drawn, with samples, and the draws. `observer` sees the model's
        positions."""
        from olive_ext.backends.chosen_documents import AnsweredRequests

        sampler = Sampler(self.question.population, self.question.claim, self.config.seed or 0)
        samples: dict[str, list[Any]] = defaultdict(list)
        quick = self.config.model_copy(update={"bootstrap_iters": 0})
        while not samples or sampler.asks:
            documents = [self.question.documents[index] for index in sampler.next_batch().tolist()]
            batch = self._evaluate(lm, quick, documents)["samples"]
            if observer is not None:
                chosen = set(documents)
                wanted = [item for item in self.generated if (item.task_name, item.doc_id) in chosen]
                score_generated(lm, wanted, observer)
            answers = read_answers(batch, self.tasks.tasks)
            values = self.question.values(BatchAnswers(documents, answers, observer, lost_documents(lm)))
            sampler.update(values.values, values.lows, values.variances)
            for task, lines in batch.items():
                samples[task] += lines
        drawn = self._drawn(sampler, observer)
        everything = [(task, number) for task, numbers in drawn.weights.items() for number in numbers]
        return self._evaluate(AnsweredRequests(lm, samples), self.config, everything), drawn

    def _evaluate(self, lm: LM, config: EvaluationConfig, documents: Sequence[Document]) -> dict[str, Any]:
        from olive_ext.backends.lm_eval_run import run_tasks

        by_task: dict[str, list[int]] = defaultdict(list)
        for task, number in documents:
            by_task[task].append(number)
        tasks = self._chosen.of(by_task)
        return run_tasks(lm, tasks, config, seeds=self.seeds, progress=self.progress, log_samples=True)

    def _drawn(self, sampler: Sampler, observer: Observer | None) -> Drawn:
        weights: dict[str, dict[int, float]] = defaultdict(dict)
        for index, weight in sampler.representation().items():
            task, number = self.question.documents[index]
            weights[task][number] = weight
        certainty = _certainty(self.config.claim, sampler.decision(), weights)
        cut = self.question.cut
        beyond = 0.0 if cut is None or observer is None else observer.beyond(cut, weights)
        return Drawn(weights, replace(certainty, outcome=self.question.outcome, cut=cut, beyond_cut=beyond))


def lost_documents(lm: Any) -> set[Document]:
    """The documents of which `lm` left a request without an answer."""
    return {(item.task, item.doc_id) for item in getattr(lm, "lost", ())}


def _certainty(certain: Certain, decision: ClaimDecision, weights: Mapping[str, Mapping[int, float]]) -> Certainty:
    numbers = repr([(task, sorted(weights[task])) for task in sorted(weights)])
    estimate, low, high = decision.estimate, decision.low, decision.high
    if certain.metric == "top1_agreement":  # asked as disagreement
        estimate, low, high = 1 - estimate, 1 - high, 1 - low
    return Certainty(
        metric=certain.metric,
        side=certain.side,
        bound=certain.bound,
        confidence=certain.confidence,
        verdict=decision.verdict,
        estimate=estimate,
        low=low,
        high=high,
        num_evaluated=decision.num_evaluated,
        num_documents=decision.num_documents,
        num_unknown=decision.num_unknown,
        sample=hashlib.sha256(numbers.encode()).hexdigest()[:16],
    )
