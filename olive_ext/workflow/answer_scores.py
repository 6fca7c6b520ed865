"""The numbers of answers: those that Olive's own functions make of them, and what is told beside these. Knows no model
and no data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from olive.evaluator.olive_evaluator import OliveEvaluator, OliveModelOutput

from olive_ext.backends.word_errors import word_errors
from olive_ext.errors import TaskError
from olive_ext.workflow.current_run import logger
from olive_ext.workflow.generated_answers import Answers

FloatArray = npt.NDArray[np.float64]


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
