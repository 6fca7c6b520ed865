"""The evaluator type `OrtEvaluator`: Olive's own metrics, of generative models on this package's engine, of others by
Olive's own evaluator. Knows no recipe."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from olive.evaluator.metric import get_latency_config_from_metric
from olive.evaluator.metric_result import MetricResult, joint_metric_key
from olive.evaluator.olive_evaluator import OliveEvaluator, OliveModelOutput
from olive.evaluator.registry import Registry
from olive.hardware import Device
from olive.model import ONNXModelHandler

from olive_ext.backends.word_errors import word_errors
from olive_ext.errors import ConfigError, MissingError, OliveExtError, TaskError, combined, first_line, listed
from olive_ext.model import ResolvedModel
from olive_ext.model.files.package_config import is_same_path
from olive_ext.plugins.speech.generated_answers import (
    Answers,
    answered,
    documents,
    is_of_answers,
    items_of,
    of_documents,
)
from olive_ext.plugins.speech.settings import METRICS_TYPE, TIMED, MetricSettings, metric_mistakes, sentences_of
from olive_ext.plugins.speech.transducer import is_transducer, opened
from olive_ext.registry import hook
from olive_ext.report import Metric, Report, write
from olive_ext.report.comparison import Comparison
from olive_ext.report.metrics import comparison_metrics
from olive_ext.report.page import SIZE
from olive_ext.report.verdict import SENTENCES
from olive_ext.run.costs import PEAK_MEMORY
from olive_ext.run.evaluation import report_of
from olive_ext.run.machine import PeakMemory
from olive_ext.run.models import Models
from olive_ext.run.reference.answers import Answers as TaskAnswers
from olive_ext.run.reference.answers import DocumentAnswer
from olive_ext.run.reference.pairing import compare_answers
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest
from olive_ext.workflow.current_run import logger, running
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.handlers import config_of, label
from olive_ext.workflow.metric_results import text_of, to_metric_result


def is_of_generations(metric: Any) -> bool:
    """Whether a generative model's metric is measured here: one of answers, or of how long they take."""
    return metric.type.value in TIMED or is_of_answers(metric)


@Registry.register(METRICS_TYPE)
class OrtEvaluator(OliveEvaluator):  # type: ignore[misc]
    """Measures Olive's metrics. Its keys are those of `MetricSettings`; Olive makes a new one for each evaluation."""

    def __init__(self, **settings: Any) -> None:
        """Raises `ConfigError` for unknown keys and wrong values."""
        super().__init__()
        self.settings = MetricSettings.parse(copy.deepcopy(settings))

    def evaluate(self, model: Any, metrics: Any = None, device: Any = None, execution_providers: Any = None) -> Any:
        """Olive's `MetricResult` for a model handler: the declared metrics, and without a priority others beside them.
        Raises an `OliveExtError` for every failure."""
        declared = list(metrics or ())
        with surfaced("the evaluation stopped"):
            if self.settings.tasks:
                return self._embeddings(model, declared, execution_providers, device)
            written = [metric.to_json() for metric in declared]
            if wrong := list(metric_mistakes({}, METRICS_TYPE, written, self.settings)):
                raise combined(wrong)
            models = self._generative(model, declared, execution_providers, device)
            generative = [metric for metric in declared if models is not None and is_of_generations(metric)]
            others = [metric for metric in declared if metric not in generative]
            path = str(model.get_resource("model_path"))
            measured = self._measured(models, path, generative) if models is not None and generative else {}
            if others:
                olives = Registry.get(str(model.framework))()
                measured |= olives.evaluate(model, others, device or Device.CPU, execution_providers).root
            logger.info("metrics measured here: %s; by Olive's own evaluator: %s", *map(_listed, (generative, others)))
            return MetricResult.model_validate(measured)

    def _embeddings(self, model: Any, declared: Sequence[Any], providers: Any, device: Any) -> Any:
        """Olive's `MetricResult` of mteb's tasks: its evaluator's names and numbers, and the declared priorities."""
        evaluate_tasks = hook("embedding_tasks", "'tasks' of an OrtEvaluator")

        models = Models(config_of(model, self.settings.as_evaluation(), device, providers))
        other = models.reference if models.config.reference is not None else None
        with PeakMemory() as memory:
            measured, execution = evaluate_tasks(models.candidate, other, self.settings)
        measured.append(Metric(PEAK_MEMORY, "bytes", "none", float(memory.bytes), higher_is_better=False))
        report = self._report(models, str(model.get_resource("model_path")), execution, measured, None)
        result = to_metric_result(report, (), self.settings.bounds)
        for name, sub_type in [(metric.name, sub_type) for metric in declared for sub_type in metric.sub_types]:
            key, main = (joint_metric_key(name, end) for end in (text_of(sub_type.name), "main_score"))
            meant = result.root.get(key, result.root.get(main))  # "accuracy_score", which Olive knows, is the main one
            if meant is None:
                raise ConfigError(f"the declared metric '{name}' is none of the tasks: {listed(self.settings.tasks)}")
            result.root[key] = meant.model_copy(update={"priority": sub_type.priority})
        return result

    def _generative(self, model: Any, metrics: Sequence[Any], providers: Any, device: Any) -> Models | None:
        """The model as this package runs it. None where no metric is of generations, or where Olive's own evaluator
        must run it: what is not a generative model, and has metrics of its own form. Raises `OliveExtError` for others.
        """
        answers = [metric for metric in metrics if is_of_answers(metric)]
        if not any(map(is_of_generations, metrics)) or not (answers or isinstance(model, ONNXModelHandler)):
            return None
        try:
            models = Models(config_of(model, self.settings.as_evaluation(), device, providers))
            _ = models.candidate.kind == "onnx" and not is_transducer(models.candidate) and models.candidate.spec
        except OliveExtError as error:
            data = [metric.data_config for metric in answers]
            if any(one is None or one.user_script is None for one in data):  # whose code makes texts of outputs
                raise
            logger.info("the model's metrics are measured by Olive's own evaluator: %s", first_line(error))
            return None
        return models

    def _measured(self, models: Models, path: str, metrics: Sequence[Any]) -> dict[str, Any]:
        """Olive's entries of metrics of generations, by their keys; a report of them if the settings name a folder."""
        declared: dict[str, Any] = {}
        measured: list[Metric] = []
        answers = []
        with PeakMemory() as memory, self._opened(models.candidate, models, metrics) as session:
            for metric in sorted(metrics, key=lambda one: not is_of_answers(one)):
                count = None
                if is_of_answers(metric):
                    answers.append((metric, answered(documents(metric, session, self.settings), session)))
                    result, beside = scored(*answers[-1], self.settings.bootstrap_iters)
                    count = len(answers[-1][1].texts)
                else:
                    session.keep_answers(None)  # what is timed is computed
                    result, beside = timed(metric, session, self.settings)
                entries = {text_of(name): entry for name, entry in result.root.items()}
                declared |= {joint_metric_key(metric.name, name): entry for name, entry in entries.items()}
                measured += _metrics(metric.name, entries, beside, count)
            peak, execution = memory.bytes, session.describe_execution()
        measured.append(Metric(PEAK_MEMORY, "bytes", "none", float(peak), higher_is_better=False))
        comparison = self._comparison(models, answers)
        measured += comparison_metrics(comparison) if comparison is not None else ()
        report = self._report(models, path, execution, measured, comparison)
        return {**to_metric_result(report, (), self.settings.bounds).root, **declared}

    @contextmanager
    def _opened(self, model: ResolvedModel, models: Models, metrics: Sequence[Any]) -> Iterator[Session]:
        """A session on a model whose answers are kept where the settings say."""
        spoken = {"language": self.settings.language, "speech_task": self.settings.speech_task}
        patch = {name: value for name, value in spoken.items() if value is not None}
        with models.clock.phase("load"):
            session = opened(model.patched(patch))
        with session:
            is_timed = any(text_of(sub_type.name) == "rtfx" for metric in metrics for sub_type in metric.sub_types)
            resume = self.settings.resume if self.settings.resume is not None else not is_timed
            if self.settings.resume and is_transducer(model):
                logger.warning("'resume' = true: a transducer's transcripts are not kept, all are computed anew")
            session.keep_answers(self.settings.journal, resume=resume)
            yield session

    def _comparison(self, models: Models, own: Answered) -> Comparison | None:
        """With the reference, which answers by itself; None without one, and for the reference itself."""
        reference = models.config.reference
        if reference is None or not own or is_same_path(models.config.model.path, reference.path):
            return None
        asked = [metric for metric, _ in own]
        with models.clock.phase("reference"), self._opened(models.reference, models, []) as session:
            other = [(metric, answered(documents(metric, session, self.settings), session)) for metric in asked]
        size = models.given_reference.size
        facts = {"path": reference.path, "kind": models.given_reference.kind, "mode": "answers"}
        return compared(own, other, facts if size is None else {**facts, SIZE: size}, self.settings.matters)

    def _report(
        self,
        models: Models,
        path: str,
        execution: dict[str, Any],
        metrics: Sequence[Metric],
        comparison: Comparison | None,
    ) -> Report:
        """What was found, written where the settings name a folder; the run in progress notes it."""
        written = self.settings.model_dump(mode="json", exclude_unset=True)
        folder = None if self.settings.output_dir is None else str(Path(self.settings.output_dir) / label(path))
        model = {"path": path, "kind": models.candidate.kind}
        report = report_of(metrics, model, execution, models.clock, comparison)
        report = replace(report, config={**written, "output_dir": folder})
        if folder is not None:
            write(report, folder)
        if (run := running.get()) is not None and (folder is not None or comparison is not None):
            run.reports.append(report)
        return report


def _metrics(task: str, entries: Mapping[str, Any], beside: Mapping[str, float], count: int | None) -> Iterator[Metric]:
    """Olive's entries with their standard errors, and the values reported beside them."""
    for name, entry in entries.items():
        stderr = beside.get(f"{name}_stderr")
        yield Metric(task, name, "none", entry.value, stderr, entry.higher_is_better, count)
    for name, value in beside.items():
        if not name.endswith("_stderr"):
            yield Metric(task, name, "none", value, None, name.endswith("_per_second"), count)


def _listed(metrics: Sequence[Any]) -> str:
    return ", ".join(metric.name for metric in metrics) or "none"


FloatArray = npt.NDArray[np.float64]

_PROMPT = "Once upon a time there was a model of language, and it was asked how it was."
_NEW_TOKENS = 64
"""The most tokens of an answer to a text, at most half of the context; answers to pictures and sounds end by
themselves."""


def scored(metric: Any, answers: Answers, resamples: int) -> tuple[Any, dict[str, float]]:
    """Olive's result of the metric, and values beside it: standard errors by document, and jiwer's word error rate.
    Raises `TaskError` where there is no document."""
    if not answers.texts:
        raise TaskError(f"'metrics.{metric.name}': its data config has no documents", f"metrics.{metric.name}")
    result = OliveEvaluator.compute_accuracy(metric, OliveModelOutput(answers.texts, answers.timing), answers.targets)
    beside: dict[str, float] = {}
    for name, values_D in values_by_document(metric, answers).items():
        if name == "wer":
            beside |= {"wer_jiwer": float(values_D.mean())}
            if resamples and len(values_D) > 1:
                counts = word_counts(answers)  # a ratio of sums, with the documents drawn anew
                drawn = np.random.default_rng(0).integers(len(counts), size=(resamples, len(counts)))
                errors_R, words_R = np.moveaxis(counts[drawn].sum(axis=1), 1, 0)
                beside["wer_stderr"] = float((errors_R / np.maximum(words_R, 1)).std(ddof=1))
        elif len(values_D) > 1:
            beside[f"{name}_stderr"] = float(values_D.std(ddof=1) / np.sqrt(len(values_D)))
    if answers.is_resumed and not answers.timing["total_inference_time"] and "rtfx" in result.root:
        result.root["rtfx"].value = math.nan  # every answer is of an earlier run
    return result, beside


def values_by_document(metric: Any, answers: Answers) -> dict[str, FloatArray]:
    """[D] of each sub type that has values of documents, of which it is the mean: of a word error rate a document's
    errors by the words of an average one, NaN where no word was said. rtfx has none, and wer none without jiwer."""
    by_metric: dict[str, FloatArray] = {}
    for sub_type in metric.sub_types:
        name = str(sub_type.name.value)
        if name == "wer":
            try:
                errors_D, words_D = word_counts(answers).T
            except TaskError as error:
                logger.info("no standard error of the word error rate: %s", error)
                continue
            by_metric[name] = errors_D / (words_D.mean() or math.nan)
        elif name != "rtfx":
            alone = metric.model_copy(update={"sub_types": [sub_type]})
            pairs = zip(answers.texts, answers.targets, strict=True)
            each = [OliveEvaluator.compute_accuracy(alone, OliveModelOutput([one], None), [two]) for one, two in pairs]
            by_metric[name] = np.array([next(iter(result.root.values())).value for result in each], np.float64)
    return by_metric


def word_counts(answers: Answers) -> FloatArray:
    """[D, 2]: wrong words and words that were said, by jiwer on the texts as they are. Raises `TaskError`."""
    return np.array(word_errors(zip(answers.targets, answers.texts, strict=True)), np.float64)


Answered = Sequence[tuple[Any, Answers]]
"""Olive's metrics, and a model's answers to each."""


def compared(own: Answered, other: Answered, facts: Mapping[str, Any], matters: float) -> Comparison | None:
    """The comparison of two models' answers to the same metrics, in their order; None where no metric has values of
    documents. Raises `TaskError` where they were asked differently."""
    candidate, reference = ([item for pair in pairs for item in _task_answers(*pair)] for pairs in (own, other))
    if not candidate:
        return None
    samples = {name: _samples(answers) for metric, answers in own for name in (metric.name, sentences_of(metric.name))}
    outcomes, flips, _ = compare_answers(reference, candidate, samples, dict.fromkeys(samples), matters)
    return Comparison(reference=facts, outcomes=outcomes, flips=flips, matters=matters)


def _task_answers(metric: Any, answers: Answers) -> list[TaskAnswers]:
    values = values_by_document(metric, answers)
    outcomes = [_of_task(metric.name, values, answers)]
    if "wer" in values:
        right_D = (values["wer"] == 0).astype(np.float64)
        outcomes.append(_of_task(sentences_of(metric.name), {SENTENCES: right_D}, answers))
    return [item for item in outcomes if item.metrics]


def _of_task(task: str, values: Mapping[str, FloatArray], answers: Answers) -> TaskAnswers:
    documents = {
        number: DocumentAnswer(digest, {name: float(values_D[number]) for name, values_D in values.items()}, text)
        for number, (text, (_, digest)) in enumerate(zip(answers.texts, answers.asked, strict=True))
    }
    return TaskAnswers(task, "none", {name: name != "wer" for name in values}, documents)


def _samples(answers: Answers) -> list[dict[str, Any]]:
    """What is shown of a document that flips, as for lm-eval's."""
    asked = zip(answers.asked, answers.targets, strict=True)
    return [
        {"doc_id": number, "filter": "none", "arguments": [(question,)], "target": target}
        for number, ((question, _), target) in enumerate(asked)
    ]


def timed(metric: Any, session: Session, settings: MetricSettings) -> tuple[Any, dict[str, float]]:
    """Olive's result of the metric, over its warm-up and repeats, each of one batch; beside it milliseconds until each
    answer of the batch has a first token, and for a token after it, and tokens generated per second."""
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
    batches = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        batches.append(time.perf_counter() - begin)
        time.sleep(pause)
    return batches


def _batch(metric: Any, session: Session, settings: MetricSettings) -> Sequence[GenerationRequest]:
    """One batch of the data config's first documents; without one a text of this package's."""
    data, name = metric.data_config, metric.name
    size = 1 if data is None else int(data.dataloader_params.get("batch_size") or 1)
    if data is not None and of_documents(data):
        found = (document.request for document in documents(metric, session, settings))
        requests = list(islice((request for request in found if request is not None), size))
    else:
        if session.encoding is not None:
            raise MissingError(f"'metrics.{name}.data_config' is missing: this model needs a source to answer to")
        most = max(1, min(_NEW_TOKENS, session.max_length // 2))
        prompts = [_PROMPT] if data is None else [_ids(given, name) for given, _ in islice(items_of(data), size)]
        requests = [GenerationRequest(prompt, max_new_tokens=most) for prompt in prompts]
    if not requests:
        raise TaskError(f"'metrics.{name}': its data config has no documents", f"metrics.{name}")
    return requests


def _ids(ids: Any, name: str) -> list[int]:
    """The token ids of a document of Olive's text data."""
    if not hasattr(ids, "keys") or "input_ids" not in ids:
        raise TaskError(f"'metrics.{name}': its data config gives no 'input_ids', no sound and no picture")
    return [int(token) for token in np.asarray(ids["input_ids"]).reshape(-1)]
