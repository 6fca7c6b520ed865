"""The numbers of answers: those that Olive's own functions make of them, what is told beside these, and two models'
answers as the comparison of tasks takes them; and `latency` and `throughput`: how long the first documents of a data
config take to be answered, and what the engine's counters say of that. Knows no model.

A word error rate's values by document are differences of one mean, as the words that were said are the same for both
models; which transcripts flip is told by the sentences without any error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from olive.evaluator.metric import get_latency_config_from_metric
from olive.evaluator.olive_evaluator import OliveEvaluator, OliveModelOutput

from olive_ext.backends.word_errors import word_errors
from olive_ext.config import MetricSettings
from olive_ext.errors import ConfigError, TaskError
from olive_ext.report.comparison import Comparison
from olive_ext.report.verdict import SENTENCES
from olive_ext.run.reference.answers import Answers as TaskAnswers
from olive_ext.run.reference.answers import DocumentAnswer
from olive_ext.run.reference.pairing import compare_answers
from olive_ext.session import Session
from olive_ext.text.requests import GenerationRequest
from olive_ext.workflow.current_run import logger
from olive_ext.workflow.generated_answers import Answers, documents, items_of, of_documents

FloatArray = npt.NDArray[np.float64]

_PROMPT = "Once upon a time there was a model of language, and it was asked how it was."
_NEW_TOKENS = 64
"""Of an answer to a text, at most half of the context; answers to pictures and sounds end by themselves."""


def scored(metric: Any, answers: Answers, resamples: int) -> tuple[Any, dict[str, float]]:
    """Olive's result of the metric, and what is told beside it: standard errors by document, and jiwer's word error
    rate. Raises `TaskError` where there is no document."""
    if not answers.texts:
        raise TaskError(f"'metrics.{metric.name}': its data config has no documents")
    result = OliveEvaluator.compute_accuracy(metric, OliveModelOutput(answers.texts, answers.timing), answers.targets)
    beside: dict[str, float] = {}
    for name, values_D in values_by_document(metric, answers).items():
        if name == "wer":
            beside |= {"wer_jiwer": float(values_D.mean())}
            if resamples and len(values_D) > 1:
                beside["wer_stderr"] = _ratio_error(word_counts(answers), resamples)
        elif len(values_D) > 1:
            beside[f"{name}_stderr"] = float(values_D.std(ddof=1) / np.sqrt(len(values_D)))
    if answers.is_resumed and not answers.timing["total_inference_time"] and "rtfx" in result.root:
        result.root["rtfx"].value = math.nan  # every answer is of an earlier run
    return result, beside


def values_by_document(metric: Any, answers: Answers) -> dict[str, FloatArray]:
    """[D] of each sub type that has values of documents, of which it is the mean: of a word error rate a document's
    errors by the words of an average one, NaN where no word was said. rtfx has none, and wer none without jiwer."""
    found: dict[str, FloatArray] = {}
    for sub_type in metric.sub_types:
        name = str(sub_type.name.value)
        if name == "wer":
            try:
                errors_D, words_D = word_counts(answers).T
            except TaskError as error:
                logger.info("no standard error of the word error rate: %s", error)
                continue
            found[name] = errors_D / (words_D.mean() or math.nan)
        elif name != "rtfx":
            alone = metric.model_copy(update={"sub_types": [sub_type]})
            pairs = zip(answers.texts, answers.targets, strict=True)
            each = [OliveEvaluator.compute_accuracy(alone, OliveModelOutput([one], None), [two]) for one, two in pairs]
            found[name] = np.array([next(iter(result.root.values())).value for result in each], np.float64)
    return found


def word_counts(answers: Answers) -> FloatArray:
    """[D, 2]: wrong words and words that were said, by jiwer on the texts as they are. Raises `TaskError`."""
    return np.array(word_errors(zip(answers.targets, answers.texts, strict=True)), np.float64)


def _ratio_error(counts: FloatArray, resamples: int) -> float:
    """The standard error of a ratio of sums, with the documents drawn anew."""
    drawn = np.random.default_rng(0).integers(len(counts), size=(resamples, len(counts)))
    errors_R, words_R = np.moveaxis(counts[drawn].sum(axis=1), 1, 0)
    return float((errors_R / np.maximum(words_R, 1)).std(ddof=1))


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


def timed(metric: Any, session: Session, settings: MetricSettings) -> tuple[Any, dict[str, float]]:
    """Olive's result of the metric, over its warm-up and repeats, each of one batch; beside it milliseconds until each
    answer of the batch has a first token, and for a token behind it, and tokens generated per second."""
    requests = _batch(metric, session, settings)
    first = [replace(request, max_new_tokens=1) for request in requests]
    warmup, repeats, pause = (number or 0 for number in get_latency_config_from_metric(metric))
    _seconds(lambda: session.generate(requests), warmup, 0)
    before = session.counters.tokens_generated
    whole = _seconds(lambda: session.generate(requests), max(repeats, 1), pause)
    tokens = (session.counters.tokens_generated - before) / len(whole)
    until_first = float(np.mean(_seconds(lambda: session.generate(first), max(repeats, 1), pause)))
    is_latency = metric.type.value == "latency"
    result = (OliveEvaluator.compute_latency if is_latency else OliveEvaluator.compute_throughput)(metric, whole)
    mean, more = float(np.mean(whole)), tokens / len(requests) - 1
    beside = {"first_token_ms": 1e3 * until_first, "tokens_per_second": tokens / mean}
    if more > 0:
        beside["output_token_ms"] = 1e3 * max(mean - until_first, 0.0) / more
    return result, beside


def _seconds(run: Callable[[], Any], count: int, pause: float) -> list[float]:
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
        time.sleep(pause)
    return found


def _batch(metric: Any, session: Session, settings: MetricSettings) -> Sequence[GenerationRequest]:
    """One batch of the data config's first documents; without one a text of this package's."""
    data, name = metric.data_config, metric.name
    size = 1 if data is None else int(data.dataloader_params.get("batch_size") or 1)
    if data is not None and of_documents(data):
        found = (document.request for document in documents(metric, session, settings))
        requests = list(islice((request for request in found if request is not None), size))
    else:
        if session.encoding is not None:
            raise ConfigError(f"'metrics.{name}.data_config' is missing: this model needs a source to answer to")
        most = max(1, min(_NEW_TOKENS, session.max_length // 2))
        prompts = [_PROMPT] if data is None else [_ids(given, name) for given, _ in islice(items_of(data), size)]
        requests = [GenerationRequest(prompt, max_new_tokens=most) for prompt in prompts]
    if not requests:
        raise TaskError(f"'metrics.{name}': its data config has no documents")
    return requests


def _ids(given: Any, name: str) -> list[int]:
    """The token ids of a document of Olive's text data."""
    if not hasattr(given, "keys") or "input_ids" not in given:
        raise TaskError(f"'metrics.{name}': its data config gives no 'input_ids', no sound and no picture")
    return [int(token) for token in np.asarray(given["input_ids"]).reshape(-1)]
