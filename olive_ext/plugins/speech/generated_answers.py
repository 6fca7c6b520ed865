"""Olive's metrics of generated answers: the documents of a data config as requests, and the answers of a session.

What is asked is what Olive's `OnnxEvaluator` asks: Whisper's first tokens for English without timestamps, 30 s at a
time; a chat of a system prompt, a picture and a question, of whose answer to numbered options the number counts.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from olive.evaluator import olive_evaluator

from olive_ext.errors import ConfigError, MediaError, TaskError, listed
from olive_ext.media.pictures import media_digest
from olive_ext.media.sound import read_samples
from olive_ext.plugins.speech.settings import MetricSettings
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest

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

    @property
    def digest(self) -> str:
        """The digest of questions and right answers, whatever form the model is asked in."""
        asked = self.request
        media = [] if asked is None else [*asked.images, *(samples_N for samples_N, _ in asked.audio)]
        return media_digest([*media, self.question, self.target])


def is_speech(metric: Any) -> bool:
    """Whether the metric is of transcriptions; `check.recipe` refuses a mixture of sub types."""
    return bool(metric.sub_types and olive_evaluator._is_text_based_metric(metric))


def is_of_answers(metric: Any) -> bool:
    """Whether the metric is of transcriptions or of answers about pictures."""
    return is_speech(metric) or bool(metric.sub_types and olive_evaluator._is_vision_metric(metric))


def of_documents(data: Any) -> bool:
    """Whether a data config has sounds or pictures to answer to."""
    return data.pre_process_data_config.type in _COLUMNS


def documents(metric: Any, session: Session, settings: MetricSettings) -> Iterator[Document]:
    """The documents of the metric's data config, in order. Raises `ConfigError` for a column that is not there, and
    `TaskError` for data of another form or a model that takes none such."""
    component, params = metric.data_config.pre_process_data_config.type, metric.data_config.pre_process_params or {}
    hears = component == _SPEECH or (component != _VISION and is_speech(metric))
    make = _transcription(session, settings, params) if hears else _answer(session)
    for given, label in items_of(metric.data_config):
        target = label[0] if isinstance(label, list | tuple) and len(label) == 1 else label
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
    rate, most = params.get("sample_rate") or _RATE, _most_tokens(session)
    prompt: Any = "" if settings.language is not None or session.encoding is None else _first_tokens(session) or ""
    if session.encoding is None:
        system = params.get("system_prompt", _SYSTEM)
        content = [{"type": "audio"}, {"type": "text", "text": params.get("instruction", _INSTRUCTION)}]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        prompt = messages[0 if system else 1 :]
    asked = GenerationRequest(prompt, max_new_tokens=session.max_length - 1, max_length=most)

    def make(row: Any) -> Document:
        samples_N = np.asarray(row["audio"] if isinstance(row, Mapping) else row, np.float32).reshape(-1)
        seconds = len(samples_N) / rate
        return Document(replace(asked, audio=[(samples_N, rate)]), "", seconds, question=f"{seconds:.1f} s of sound")

    return make


def _most_tokens(session: Session) -> int:
    """The most tokens of prompt and transcript, as genai_config.json gives it for Olive; else Olive's own numbers."""
    search = {} if session.model is None else session.model.files.genai_config.get("search", {})
    return int(search.get("max_length") or (1024 if session.encoding is None else 448))


def _first_tokens(session: Session) -> list[int]:
    """The tokens that Olive gives Whisper's decoder, if the tokenizer names all of them; else none."""
    known = session.tokenizer.hf.get_vocab()
    is_english = session.tokenizer.rows.embedding == _ENGLISH_ONLY
    tokens = [known.get(name) for name in (_START[0], _START[3])] if is_english else list(map(known.get, _START))
    return [] if None in tokens else [token for token in tokens if token is not None]


def _answer(session: Session) -> Callable[[Any], Document]:
    """Makes the document that asks a model of pictures, from a mapping of "image", "question" and more."""

    def make(row: Any) -> Document:
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

    return make


@dataclass(frozen=True)
class Answers:
    """A model's answers to the documents of one metric, and how long they took."""

    texts: list[str]
    targets: list[str]
    timing: dict[str, float]
    """Olive's names: seconds of the sounds, and of the answers to them, as far as they were computed in this run."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    """Question and digest of each document."""

    is_resumed: bool = False
    """Whether answers came from the journal, so that their time is not known."""


def answered(asked: Iterator[Document], session: Session) -> Answers:
    """Greedy answers. What is loaded for the first request (processors) is not in their time, as it is not in Olive's.
    Raises `LostRequestsError` where a picture or a sound cannot be read."""
    answers = Answers([], [], {"total_audio_duration": 0.0, "total_inference_time": 0.0})
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
            answers.asked.append((document.question, document.digest))
    return answers


def chosen(text: str, num_choices: int) -> str:
    """The number of an option in an answer, where there are one to nine; else the answer. Olive's `OnnxEvaluator` does
    the same inside a longer function."""
    if not 1 <= num_choices <= 9:
        return text
    number = re.search(rf"\b([1-{num_choices}])\b", text) or re.search(rf"([1-{num_choices}])", text)
    return number[1] if number else text
