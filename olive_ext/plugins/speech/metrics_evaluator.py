"""The evaluator type `OrtEvaluator`: Olive's own metrics, of generative models on this package's engine, of others by
Olive's own evaluator. Knows no recipe.

What is asked is what Olive's `OnnxEvaluator` asks: Whisper's first tokens for English without timestamps, 30 s at a
time; a chat of a system prompt, a picture and a question, of whose answer to numbered options the number counts.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from olive.evaluator import olive_evaluator
from olive.evaluator.metric import get_latency_config_from_metric
from olive.evaluator.metric_result import MetricResult, joint_metric_key
from olive.evaluator.olive_evaluator import OliveEvaluator, OliveModelOutput
from olive.evaluator.registry import Registry
from olive.hardware import Device
from olive.model import ONNXModelHandler

from olive_ext.backends.word_errors import word_errors
from olive_ext.errors import (
    ConfigError,
    MediaError,
    MissingError,
    OliveExtError,
    TaskError,
    combined,
    first_line,
    listed,
)
from olive_ext.media.pictures import media_digest
from olive_ext.media.processor import read_samples
from olive_ext.model import ResolvedModel
from olive_ext.model.files.package_config import is_same_path
from olive_ext.plugins.speech.settings import METRICS_TYPE, TIMED, MetricSettings, metric_mistakes, sentences_of
from olive_ext.plugins.speech.transducer import is_transducer, opened
from olive_ext.registry import hook
from olive_ext.report import Metric, Report, write
from olive_ext.report.comparison import Comparison
from olive_ext.report.metrics import comparison_metrics
from olive_ext.report.page import SIZE
from olive_ext.report.verdict import SENTENCES
from olive_ext.run.bounds import PEAK_MEMORY
from olive_ext.run.evaluation import report_of
from olive_ext.run.machine import PeakMemory
from olive_ext.run.models import Models
from olive_ext.run.reference.answers import Answers as TaskAnswers
from olive_ext.run.reference.answers import DocumentAnswer
from olive_ext.run.reference.pairing import compare_answers
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest
from olive_ext.workflow.current_run import logger, running
from olive_ext.workflow.evaluator import surfaced, text_of, to_metric_result
from olive_ext.workflow.handlers import config_of, label


def is_speech(metric: Any) -> bool:
    """Whether the metric is of transcriptions; `check.recipe` refuses a mixture of sub types."""
    return bool(metric.sub_types and olive_evaluator._is_text_based_metric(metric))


def is_of_answers(metric: Any) -> bool:
    """Whether the metric is of transcriptions or of answers about pictures."""
    return is_speech(metric) or bool(metric.sub_types and olive_evaluator._is_vision_metric(metric))


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
            names = (", ".join(metric.name for metric in some) or "none" for some in (generative, others))
            logger.info("metrics measured here: %s; by Olive's own evaluator: %s", *names)
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
                    answers.append(answered(metric, session, self.settings))
                    result, beside = scored(answers[-1], self.settings.bootstrap_iters)
                    count = len(answers[-1].texts)
                else:
                    session.keep_answers(None)  # what is timed is computed
                    result, beside = timed(metric, session, self.settings)
                entries = {text_of(name): entry for name, entry in result.root.items()}
                declared |= {joint_metric_key(metric.name, name): entry for name, entry in entries.items()}
                for name, entry in entries.items():
                    stderr = beside.pop(f"{name}_stderr", None)
                    measured.append(
                        Metric(metric.name, name, "none", entry.value, stderr, entry.higher_is_better, count)
                    )
                for name, value in beside.items():
                    measured.append(Metric(metric.name, name, "none", value, None, name.endswith("_per_second"), count))
            peak, execution = memory.bytes, session.describe_execution()
        measured.append(Metric(PEAK_MEMORY, "bytes", "none", float(peak), higher_is_better=False))
        reference, comparison = models.config.reference, None
        if reference is not None and answers and not is_same_path(models.config.model.path, reference.path):
            with models.clock.phase("reference"), self._opened(models.reference, models, []) as session:
                other = [answered(one.metric, session, self.settings) for one in answers]
            size = models.given_reference.size
            facts: dict[str, Any] = {"path": reference.path, "kind": models.given_reference.kind, "mode": "answers"}
            facts |= {} if size is None else {SIZE: size}
            comparison = compared(answers, other, facts, self.settings.matters)
        measured += comparison_metrics(comparison) if comparison is not None else ()
        report = self._report(models, path, execution, measured, comparison)
        return {**to_metric_result(report, (), self.settings.bounds).root, **declared}

    @contextmanager
    def _opened(self, model: ResolvedModel, models: Models, metrics: Sequence[Any]) -> Iterator[Session]:
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
            run.add(report)
        return report


FloatArray = npt.NDArray[np.float64]

_PROMPT = "Once upon a time there was a model of language, and it was asked how it was."
_NEW_TOKENS = 64
"""The most tokens of an answer to a text, at most half of the context; answers to pictures and sounds end by
themselves."""


_SPEECH, _VISION = "speech_transcription_pre_process", "vision_vqa_pre_process"
_COLUMNS = {_SPEECH: ("audio_col", "text_col"), _VISION: ("image_col", "question_col", "answer_col", "options_col")}
"""Parameters of Olive's components that name columns."""

_START = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
_ENGLISH_ONLY = 51864
"""Rows of the vocabulary of Whisper's models that know no other language, and have no tokens of one."""

_RATE = 16000
_SYSTEM = (
    "You are an automatic speech recognition (ASR) system. Output only the exact verbatim transcript of the speech in "
    "the audio. Do not add commentary, explanations, or apologies. If unsure, output your best guess."
)
_INSTRUCTION = "Transcribe the audio verbatim."
"""What later releases of Olive ask a chat model that hears, unless the data config has "system_prompt" and
"instruction"; 0.13 evaluates none."""

_TOGETHER = 512
"""The most documents in memory at once."""


@dataclass(frozen=True)
class Document:
    """The question, and the right answer."""

    request: GenerationRequest | None
    """None where nothing can be asked: Olive counts the document with an empty answer."""

    target: str
    seconds: float = 0.0
    """The length of all sounds."""

    num_choices: int = 0
    """Numbered options of the question."""

    question: str = ""


@dataclass(frozen=True)
class Answers:
    """A model's answers to the documents of one of Olive's metrics, and how long they took."""

    metric: Any
    texts: list[str]
    targets: list[str]
    timing: dict[str, float]
    """Olive's names: seconds of the sounds, and of the answers to them, as far as they were computed in this run."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    """Question and digest of each document."""

    is_resumed: bool = False
    """Whether answers came from the journal, so that their time is not known."""

    @cached_property
    def values(self) -> dict[str, FloatArray]:
        """[D] of each sub type that has values of documents, of which it is the mean: of a word error rate a document's
        errors by the words of an average one, NaN where no word was said. rtfx has none, and wer none without jiwer."""
        values: dict[str, FloatArray] = {}
        for sub_type in self.metric.sub_types:
            name = str(sub_type.name.value)
            if name == "wer":
                try:
                    errors_D, words_D = self.word_counts.T
                except TaskError as error:
                    logger.info("no standard error of the word error rate: %s", error)
                    continue
                values[name] = errors_D / (words_D.mean() or math.nan)
            elif name != "rtfx":
                alone = self.metric.model_copy(update={"sub_types": [sub_type]})
                pairs = zip(self.texts, self.targets, strict=True)
                each = [OliveEvaluator.compute_accuracy(alone, OliveModelOutput([a], None), [b]) for a, b in pairs]
                values[name] = np.array([next(iter(result.root.values())).value for result in each], np.float64)
        return values

    @cached_property
    def word_counts(self) -> FloatArray:
        """[D, 2]: wrong words and words that were said, by jiwer on the texts as they are. Raises `TaskError`."""
        return np.array(word_errors(zip(self.targets, self.texts, strict=True)), np.float64)

    def of_tasks(self) -> Iterator[TaskAnswers]:
        """The answers as those of tasks: of the metric, and of its sentences where it counts words."""
        tasks = {self.metric.name: self.values}
        if "wer" in self.values:
            tasks[sentences_of(self.metric.name)] = {SENTENCES: (self.values["wer"] == 0).astype(np.float64)}
        for task, values in tasks.items():
            documents = {
                number: DocumentAnswer(
                    digest, {name: float(values_D[number]) for name, values_D in values.items()}, text
                )
                for number, (text, (_, digest)) in enumerate(zip(self.texts, self.asked, strict=True))
            }
            if values:
                yield TaskAnswers(task, "none", {name: name != "wer" for name in values}, documents)


def scored(answers: Answers, resamples: int) -> tuple[Any, dict[str, float]]:
    """Olive's result of the metric, and values beside it: standard errors by document, and jiwer's word error rate.
    Raises `TaskError` where there is no document."""
    metric = answers.metric
    if not answers.texts:
        raise TaskError(f"'metrics.{metric.name}': its data config has no documents", f"metrics.{metric.name}")
    result = OliveEvaluator.compute_accuracy(metric, OliveModelOutput(answers.texts, answers.timing), answers.targets)
    beside: dict[str, float] = {}
    for name, values_D in answers.values.items():
        if name == "wer":
            beside |= {"wer_jiwer": float(values_D.mean())}
            if resamples and len(values_D) > 1:
                counts = answers.word_counts  # a ratio of sums, with the documents drawn anew
                drawn = np.random.default_rng(0).integers(len(counts), size=(resamples, len(counts)))
                errors_R, words_R = np.moveaxis(counts[drawn].sum(axis=1), 1, 0)
                beside["wer_stderr"] = float((errors_R / np.maximum(words_R, 1)).std(ddof=1))
        elif len(values_D) > 1:
            beside[f"{name}_stderr"] = float(values_D.std(ddof=1) / np.sqrt(len(values_D)))
    if answers.is_resumed and not answers.timing["total_inference_time"] and "rtfx" in result.root:
        result.root["rtfx"].value = math.nan  # every answer is of an earlier run
    return result, beside


def compared(
    own: Sequence[Answers], other: Sequence[Answers], facts: Mapping[str, Any], matters: float
) -> Comparison | None:
    """The comparison of two models' answers to the same metrics, in their order; None where no metric has values of
    documents. Raises `TaskError` where they were asked differently."""
    candidate, reference = ([task for one in answers for task in one.of_tasks()] for answers in (own, other))
    if not candidate:
        return None
    samples: dict[str, list[dict[str, Any]]] = {}
    for one in own:  # what is shown of a document that flips, as for lm-eval's
        shown = [
            {"doc_id": number, "filter": "none", "arguments": [(question,)], "target": target}
            for number, ((question, _), target) in enumerate(zip(one.asked, one.targets, strict=True))
        ]
        samples |= {one.metric.name: shown, sentences_of(one.metric.name): shown}
    return compare_answers(Comparison(facts, matters=matters), reference, candidate, samples, dict.fromkeys(samples))


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
    if data is not None and data.pre_process_data_config.type in _COLUMNS:  # sounds or pictures
        found = (document.request for document in documents(metric, session, settings))
        requests = list(islice((request for request in found if request is not None), size))
    else:
        if session.encoding is not None:
            raise MissingError(f"'metrics.{name}.data_config' is missing: this model needs a source to answer to")
        most = max(1, min(_NEW_TOKENS, session.max_length // 2))
        requests = [GenerationRequest(_PROMPT, max_new_tokens=most)] if data is None else []
        for given, _ in () if data is None else islice(items_of(data), size):
            if not hasattr(given, "keys") or "input_ids" not in given:
                raise TaskError(f"'metrics.{name}': its data config gives no 'input_ids', no sound and no picture")
            ids = [int(token) for token in np.asarray(given["input_ids"]).reshape(-1)]
            requests.append(GenerationRequest(ids, max_new_tokens=most))
    if not requests:
        raise TaskError(f"'metrics.{name}': its data config has no documents", f"metrics.{name}")
    return requests


def answered(metric: Any, session: Session, settings: MetricSettings) -> Answers:
    """Greedy answers to the metric's documents. What is loaded for the first request (processors) is not in their time,
    as it is not in Olive's. Raises `LostRequestsError` where a picture or a sound cannot be read."""
    asked = documents(metric, session, settings)
    answers = Answers(metric, [], [], {"total_audio_duration": 0.0, "total_inference_time": 0.0})
    while some := list(islice(asked, _TOGETHER)):
        requests = [document.request for document in some if document.request is not None]
        if not answers.texts and requests:
            session.generate([replace(requests[0], max_new_tokens=1)])
        known, begin = session.counters.requests, time.perf_counter()
        outputs = iter(session.generate(requests))
        seconds = time.perf_counter() - begin
        if session.journal is None or session.counters.requests - known == len(requests):
            answers.timing["total_inference_time"] += seconds
            answers.timing["total_audio_duration"] += sum(document.seconds for document in some)
        else:
            answers = replace(answers, is_resumed=True)
        for document in some:
            text = "" if document.request is None else next(outputs).text.strip()
            answers.texts.append(chosen(text, document.num_choices))
            answers.targets.append(document.target)
            given = document.request  # whose form differs between models: its digest is of question and answer
            media = [] if given is None else [*given.images, *(samples_N for samples_N, _ in given.audio)]
            answers.asked.append((document.question, media_digest([*media, document.question, document.target])))
    return answers


def chosen(text: str, num_choices: int) -> str:
    """The number of an option in an answer, where there are one to nine; else the answer. Olive's `OnnxEvaluator` does
    the same inside a longer function."""
    if not 1 <= num_choices <= 9:
        return text
    number = re.search(rf"\b([1-{num_choices}])\b", text) or re.search(rf"([1-{num_choices}])", text)
    return number[1] if number else text


def documents(metric: Any, session: Session, settings: MetricSettings) -> Iterator[Document]:
    """The documents of the metric's data config, in order. Raises `ConfigError` for a column that is not there, and
    `TaskError` for data of another form or a model that takes none such."""
    component, params = metric.data_config.pre_process_data_config.type, metric.data_config.pre_process_params or {}
    hears = component == _SPEECH or (component != _VISION and is_speech(metric))
    make = _transcription(session, settings, params) if hears else partial(_answer, session)
    for given, target in items_of(metric.data_config):
        target = target[0] if isinstance(target, list | tuple) and len(target) == 1 else target
        yield replace(make(given), target=str(target))


def items_of(data: Any) -> Iterator[tuple[Any, Any]]:
    """Input and label of each document, as Olive's components make them of what its container loads."""
    container = data.to_data_container()
    dataset = container.load_dataset()
    component, params = data.pre_process_data_config.type, data.pre_process_params or {}
    known = getattr(dataset, "column_names", None)
    for key in _COLUMNS.get(component, ()):
        if known and params.get(key) and params[key] not in known:
            where = f"'data_configs.{data.name}.pre_process_data_config.params.{key}' = '{params[key]}'"
            raise ConfigError(f"{where}: the data has the columns {listed(known)}")
    made = container.pre_process(dataset)
    if component == _SPEECH and importlib.util.find_spec("torchcodec") is None:
        yield from _wave_files(made, params.get("sample_rate", _RATE))
        return
    for number in range(len(made)):
        item = made[number]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise TaskError(f"document {number} of the data config '{data.name}' is no pair of input and label")
        yield item[0], item[1]


def _wave_files(made: Any, rate: int) -> Iterator[tuple[Any, Any]]:
    """What Olive's data set of speech would decode with torchcodec, where that is not installed: WAV files of the
    requested rate."""
    feature = replace(made.dataset.features[made.audio_column], decode=False)
    for row in made.dataset.cast_column(made.audio_column, feature):
        file = row[made.audio_column]
        try:
            samples_N = read_samples(file["bytes"] or file["path"], rate)
        except MediaError as error:
            raise MediaError(f"{error} (with torchcodec installed other files are read, and resampled)") from error
        yield samples_N, row[made.text_column]


def _transcription(session: Session, settings: MetricSettings, params: Mapping[str, Any]) -> Callable[[Any], Document]:
    """Makes the document that asks a model of speech, from samples [N] or [1, N]."""
    rate, search = params.get("sample_rate") or _RATE, {}
    if session.model is not None:
        search = session.model.files.genai_config.get("search", {})
    prompt: Any = ""
    if session.encoding is not None and settings.language is None:
        known, is_english = session.tokenizer.hf.get_vocab(), session.tokenizer.rows.embedding == _ENGLISH_ONLY
        start = (_START[0], _START[3]) if is_english else _START
        prompt = [known[name] for name in start] if known.keys() >= {*start} else ""  # as Olive begins Whisper's text
    if session.encoding is None:
        system = params.get("system_prompt", _SYSTEM)
        content = [{"type": "audio"}, {"type": "text", "text": params.get("instruction", _INSTRUCTION)}]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        prompt = messages[0 if system else 1 :]
    most = int(search.get("max_length") or (1024 if session.encoding is None else 448))  # or Olive's own numbers
    asked = GenerationRequest(prompt, max_new_tokens=session.max_length - 1, max_length=most)

    def make(row: Any) -> Document:
        samples_N = np.asarray(row["audio"] if isinstance(row, Mapping) else row, np.float32).reshape(-1)
        seconds = len(samples_N) / rate
        return Document(replace(asked, audio=[(samples_N, rate)]), "", seconds, question=f"{seconds:.1f} s of sound")

    return make


def _answer(session: Session, row: Any) -> Document:
    """The document that asks a model of pictures, from a mapping of "image", "question" and more."""
    if not isinstance(row, Mapping) or "question" not in row:
        raise TaskError(f"the metric is of answers about pictures; its data config gives a {type(row).__name__}")
    if row.get("image") is None:
        return Document(None, "", question=str(row["question"]))
    content = [{"type": "image"}, {"type": "text", "text": row["question"]}]
    system = [{"role": "system", "content": row["system_prompt"]}] if row.get("system_prompt") else []
    request = GenerationRequest(
        [*system, {"role": "user", "content": content}],
        images=[row["image"]],
        max_new_tokens=session.max_length - 1,
        max_length=row.get("max_length", 4096),
    )
    return Document(request, "", 0.0, row.get("num_choices", 0), str(row["question"]))
