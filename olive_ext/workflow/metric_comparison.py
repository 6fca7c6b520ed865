"""Answers of two models to the documents of Olive's metrics, as the comparison of tasks takes them. Knows no session.

A word error rate's values by document are differences of one mean, as the words that were said are the same for both
models; which transcripts flip is told by the sentences without any error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from olive_ext.report.comparison import Comparison
from olive_ext.report.verdict import SENTENCES
from olive_ext.run.reference.answers import Answers as TaskAnswers
from olive_ext.run.reference.answers import DocumentAnswer
from olive_ext.run.reference.pairing import compare_answers
from olive_ext.workflow.answer_scores import FloatArray, values_by_document
from olive_ext.workflow.generated_answers import Answers

Answered = Sequence[tuple[Any, Answers]]
"""Olive's metrics, and a model's answers to each."""


def compared(own: Answered, other: Answered, facts: Mapping[str, Any], matters: float) -> Comparison | None:
    """The comparison of two models' answers to the same metrics, in their order; None where no metric has values of
    documents. Raises `TaskError` where they were asked differently."""
    candidate, reference = ([item for one in pairs for item in _task_answers(*one)] for pairs in (own, other))
    if not candidate:
        return None
    samples = {name: _samples(answers) for metric, answers in own for name in (metric.name, sentences_of(metric.name))}
    outcomes, flips, _ = compare_answers(reference, candidate, samples, dict.fromkeys(samples), matters)
    return Comparison(reference=facts, outcomes=outcomes, flips=flips, matters=matters)


def sentences_of(name: str) -> str:
    """The task that has the sentences of a metric of transcripts."""
    return f"{name}_sentences"


def _task_answers(metric: Any, answers: Answers) -> list[TaskAnswers]:
    values = values_by_document(metric, answers)
    found = [_of_task(metric.name, values, answers)]
    if "wer" in values:
        right_D = (values["wer"] == 0).astype(np.float64)
        found.append(_of_task(sentences_of(metric.name), {SENTENCES: right_D}, answers))
    return [item for item in found if item.metrics]


def _of_task(task: str, values: Mapping[str, FloatArray], answers: Answers) -> TaskAnswers:
    documents = {
        number: DocumentAnswer(digest, {name: float(values_D[number]) for name, values_D in values.items()}, text)
        for number, (text, (_, digest)) in enumerate(zip(answers.texts, answers.asked, strict=True))
    }
    return TaskAnswers(task, "none", {name: name != "wer" for name in values}, documents)


def _samples(answers: Answers) -> list[dict[str, Any]]:
    """As lm-eval's, what is shown of a document that flips."""
    asked = zip(answers.asked, answers.targets, strict=True)
    return [
        {"doc_id": number, "filter": "none", "arguments": [(question,)], "target": target}
        for number, ((question, _), target) in enumerate(asked)
    ]
