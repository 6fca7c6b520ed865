"""A model's answers to each document, read from lm-eval's samples and kept small; and as report.json and a gate's
baseline keep them: numbers packed to a few bytes, and no text. Knows no model and no session."""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.backends.word_errors import word_errors
from olive_ext.errors import ANY_FAILURE, TaskError
from olive_ext.media.pictures import media_digest
from olive_ext.report import PackedAnswers
from olive_ext.report.comparison import PERPLEXITY
from olive_ext.report.metrics import CUT_OFF, LENGTHS, STOPPED
from olive_ext.stats.compared_fields import FloatArray

_MAX_TEXT = 4000
"""Characters kept of an answer from its beginning, and of a question from its end."""

_LENGTHS: Mapping[str, Callable[[str], int]] = {"acc_norm": len, "acc_bytes": lambda text: len(text.encode())}
"""Metrics for which lm-eval divides a choice's log-probability by its length, and that length."""

TEXT_METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte", PERPLEXITY)
"""lm-eval's metrics of whole texts, whose value of a document is its log-likelihood and its words or bytes; and of
targets, whose value is the log-likelihood."""

NATS, UNITS = "loglikelihood", "units"
"""The names of the two among a document's values."""

WER, WORDS = "wer", "words"
"""Among a document's values, a word error rate, and the words of an average document, by which errors are divided."""

ITEMS = "items of "
"""Before the name of a score of a whole task (F1, MCC, BLEU) among a document's values: a number that stands for what
the document adds to the score, and can only be the same in another run or not."""

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class DocumentAnswer:
    """A model's answer to one document after one filter: the values of its metrics, and its text."""

    digest: str
    """Digests of the document, of its prompts and choices, and of the target."""

    values: Mapping[str, float]
    text: str
    margin: float | None = None
    """How far the answer is from being another one: in nats by the metric's normalisation, between the right choice and
    the best wrong one; for a single target between right and wrong, up to a constant. None for a generation."""

    scores: tuple[float, ...] = ()
    """The score of each choice, in nats by the metric's normalisation; empty for other answers."""

    generated: str = ""
    """Digest of all texts that the model generated; empty where it generated none."""


@dataclass(frozen=True)
class Answers:
    """One model's answers to one task after one filter, by document."""

    task: str
    filter: str
    metrics: Mapping[str, bool | None]
    """Whether higher is better, by metric, in the task's order: only for metrics that are means over documents. None
    where neither the task nor lm-eval says it."""

    by_document: Mapping[int, DocumentAnswer]
    text_metric: str = ""
    """The perplexity that judges the task's whole texts; empty for other tasks."""

    @property
    def judged(self) -> dict[str, bool | None]:
        """All metrics that two models can be compared by, and whether higher is better."""
        return {**self.metrics, **({self.text_metric: False} if self.text_metric else {})}

    def of(self, documents: Collection[int]) -> Answers:
        """The answers to `documents` alone."""
        chosen = {number: answer for number, answer in self.by_document.items() if number in documents}
        return replace(self, by_document=chosen)

    def right(self, metric: str) -> FloatArray:
        """[D]: 1 for every right answer, 0 for every wrong one and NaN for one without a value, by document."""
        values = np.array([answer.values.get(metric, math.nan) for answer in self.by_document.values()], np.float64)
        return values if self.metrics[metric] else 1 - values


def mean_metrics(task: Any) -> dict[str, bool | None]:
    """The metrics of lm-eval's `task` that have a value for each document, and whether a higher one is better."""
    functions, directions = task.aggregation(), task.higher_is_better()
    from olive_ext.backends.evaluated_task import means_of  # imports lm-eval

    means = {*means_of(functions), WER}
    return {name: directions.get(name) for name in functions if name in means}


def read_answers(samples: Mapping[str, Sequence[Sample]], tasks: Mapping[str, Any]) -> list[Answers]:
    """The answers in lm-eval's order of tasks and filters. `tasks` are lm-eval's task objects by name."""
    read = []
    for name, lines in samples.items():
        task = tasks[name]
        functions = task.aggregation()
        # Of numbers that a task's own code gives beside its metrics, lm-eval takes the mean.
        beside = sorted({key for line in lines for key in line.get("metrics", ())} - functions.keys())
        metrics = mean_metrics(task) | dict.fromkeys(beside)
        for filter_name in dict.fromkeys(line["filter"] for line in lines):
            chosen = [line for line in lines if line["filter"] == filter_name]
            chosen = _with_word_errors(chosen, functions[WER]) if WER in functions else chosen
            valued = {key: metrics[key] for key in metrics if any(is_value(line.get(key)) for line in chosen)}
            whole = functions.keys() - {*metrics, *TEXT_METRICS}
            texts = TEXT_METRICS[: -1 if PERPLEXITY in metrics else None]  # a mean of perplexities is no log-likelihood
            text = next((key for key in texts if any(_of_text(line, key) for line in chosen)), "")
            answers = {int(line["doc_id"]): _answer(task, line, [*valued], whole, text) for line in chosen}
            if any(CUT_OFF in answer.values for answer in answers.values()):
                valued |= dict.fromkeys((CUT_OFF, STOPPED), False)
            read.append(Answers(name, filter_name, valued, answers, text))
    return read


def primary_answers(reference: Sequence[Answers]) -> dict[str, tuple[Answers, str]]:
    """The reference's answers and primary metric of each task, by the rule of `report.comparison.primary_outcomes`."""
    binary, primary = [], dict[str, tuple[Answers, str]]()
    for item in reference:
        for name in [name for name, better in item.metrics.items() if name not in LENGTHS and better is not None]:
            known = item.of([number for number, answer in item.by_document.items() if name in answer.values])
            if (values := {*known.right(name)}) <= {0.0, 1.0}:  # every answer that has a value is right or wrong
                binary.append((known, name, 1.0 in values))
    for known, name, _ in sorted(binary, key=lambda each: not each[2]):
        primary.setdefault(known.task, (known, name))
    return {item.task: primary[item.task] for item in reference if item.task in primary}


def changed_answers(reference: Sequence[Answers], candidate: Sequence[Answers]) -> int:
    """The number of documents whose generated texts differ, or where a limit ends only one model's answer."""
    theirs = {(item.task, number): answer for item in reference for number, answer in item.by_document.items()}
    ours = {(item.task, number): answer for item in candidate for number, answer in item.by_document.items()}
    return sum(_generated(ours[key]) != _generated(theirs[key]) for key in ours.keys() & theirs.keys())


def _generated(answer: DocumentAnswer) -> tuple[str, float | None] | None:
    return (answer.generated, answer.values.get(CUT_OFF)) if answer.generated else None


def reads_all_columns(config: Mapping[str, Any]) -> bool:
    """Whether a task's own code may score a document by any of its columns, by lm-eval's dump of its definition."""
    return config.get("process_results") is not None or "filter_fn" in str(config.get("filter_list"))


def check_same_questions(
    reference: Answers,
    candidate: Answers,
    config: Mapping[str, Any] = MappingProxyType({}),
    *,
    has_same_prompts: bool = True,
) -> None:
    """Raises `TaskError` where the documents of two runs of one task differ, or the prompts, which are the same unless
    each model is asked by its own files. `config`: the task's definition, as lm-eval dumps it."""
    first, second = reference.by_document, candidate.by_document
    begin = 0 if reads_all_columns(config) else 1  # a document's unused columns may differ
    parts = slice(begin, None) if has_same_prompts else slice(None, None, 2)
    both = [item for item in second if item in first]
    differing = [one for one in both if first[one].digest.split(" ")[parts] != second[one].digest.split(" ")[parts]]
    if first.keys() != second.keys() or differing:
        what = f"document {differing[0]}" if differing else "other documents"
        raise TaskError(f"task '{candidate.task}' asked the two models differently ({what})", code="not_comparable")


def question_of(task: Any, sample: Sample) -> str:
    """The document's question without examples, where the task's code gives it; else the prompt."""
    text = _try(lambda: task.doc_to_text(sample["doc"]))
    if not isinstance(text, str) or not text.strip():
        text = str(sample["arguments"][0][0]) if sample["arguments"] else ""
    return text.strip()[-_MAX_TEXT:]


def target_of(task: Any, sample: Sample) -> str:
    """The right answer as a text; several are separated by " | "."""
    target = sample["target"]
    choices = _choices(task, sample)
    if choices and getattr(task, "multiple_input", False):
        target = _try(lambda: task.doc_to_text(sample["doc"]))
    targets: Sequence[Any] = target if isinstance(target, list | tuple) else [target]
    named = [choices[item] if isinstance(item, int) and 0 <= item < len(choices) else item for item in targets]
    return " | ".join(str(item).strip() for item in named)[:_MAX_TEXT]


def is_value(value: object) -> bool:
    """Whether a metric's value of a document is a finite number."""
    return isinstance(value, Real | np.bool_) and math.isfinite(value)


def _with_word_errors(lines: list[Sample], rate: Any) -> list[Sample]:
    """The lines, with numbers for the pairs of texts whose word error rate the task's `rate` is: each document's errors
    by the words of an average one, the mean of which is the rate."""
    said = [line[WER] for line in lines if isinstance(line.get(WER), tuple | list)]
    try:
        errors_D, words_D = np.array(word_errors(said), np.float64).reshape(-1, 2).T
        is_rate = math.isclose(rate(said), errors_D.sum() / words_D.sum(), rel_tol=1e-9)
    except ANY_FAILURE:  # of other values, of the task's own code, or without jiwer
        return lines
    if not is_rate:
        return lines
    words, numbers = float(words_D.mean()), iter((errors_D / words_D.mean()).tolist())
    has_pair = [isinstance(line.get(WER), tuple | list) for line in lines]
    return [
        {**line, WER: next(numbers), WORDS: words} if has else line for line, has in zip(lines, has_pair, strict=True)
    ]


def _of_text(line: Sample, metric: str) -> dict[str, float]:
    """A text's log-likelihood in nats and its length, which is 1 of a target; empty for a value that is neither."""
    value = line.get(metric)
    value = (value, 1.0) if metric == PERPLEXITY and is_value(value) else value
    pair = [float(item) for item in value if is_value(item)] if isinstance(value, list | tuple) else []
    is_pair = isinstance(value, list | tuple) and len(value) == len(pair) == 2 and pair[1] > 0
    return dict(zip((NATS, UNITS), pair, strict=True)) if is_pair else {}


def _answer(
    task: Any, line: Sample, metrics: Sequence[str], whole: Collection[str], text_metric: str
) -> DocumentAnswer:
    values = {name: float(line[name]) for name in (*metrics, WORDS) if is_value(line.get(name))}
    items = {name: repr(line[name]) for name in whole if isinstance(line.get(name), tuple | list | str)}
    values |= {f"{ITEMS}{name}": float(zlib.crc32(item.encode(errors="replace"))) for name, item in items.items()}
    values |= _of_text(line, text_metric)
    values = shares_of_ends(line) | values
    # lm-eval hashes a document with pictures by where these lie in memory.
    has_media = any(len(arguments) > 2 for arguments in line["arguments"])
    document = media_digest([line["doc"]]) if has_media else line["doc_hash"]
    asked = [text for arguments in line["arguments"] for text in arguments[:2] if isinstance(text, str)]
    asked += [media_digest(arguments[2:]) for arguments in line["arguments"] if len(arguments) > 2]
    asked_hash = hashlib.sha256(repr((line["prompt_hash"], asked)).encode()).hexdigest()
    digest = " ".join(str(part) for part in (document, asked_hash, line["target_hash"]))
    text, margin, scores = _read(task, line, next(iter(metrics), ""))
    texts = [item for items in line["resps"] for item in items if isinstance(item, str)]
    generated = hashlib.sha256(repr([*map(str, texts)]).encode()).hexdigest()[:16] if texts else ""
    return DocumentAnswer(digest, values, text[:_MAX_TEXT], margin, scores, generated)


def shares_of_ends(line: Sample) -> dict[str, float]:
    """The shares of a document's generated answers that their limit and a stop string ended; empty if not known."""
    ends: list[Any] = [getattr(item, "ends", None) for items in line["resps"] for item in items]
    known = {} if None in ends or not ends else ends[0]
    return {name: math.fsum(item[name] for item in ends) / len(ends) for name in known}


def _read(task: Any, line: Sample, metric: str) -> tuple[str, float | None, tuple[float, ...]]:
    """The answer as text: of choices the one that `metric` takes for the answer, of a generation its text before any
    filter, of a single target whether it was the most likely; and `DocumentAnswer.margin` and `scores`."""
    responses = [items[0] if isinstance(items, list | tuple) and items else items for items in line["resps"]]
    scores = [item[0] for item in responses if isinstance(item, tuple | list) and len(item) == 2]
    if not scores or len(scores) < len(responses):
        return str(responses[0]).strip() if responses else "", None, ()
    if len(scores) == 1:
        is_greedy = responses[0][1]
        text = f"{'most likely' if is_greedy else 'not most likely'} ({scores[0]:.2f} nats)"
        return text, scores[0] if is_greedy else -scores[0], ()
    choices = _choices(task, line) or [str(arguments[1]).strip() for arguments in line["arguments"]]
    length = _LENGTHS.get(metric)
    lengths = [max(1, length(choice)) if length is not None else 1 for choice in choices]
    weighed = tuple(score / number for score, number in zip(scores, lengths, strict=False))
    chosen, target = weighed.index(max(weighed)), line["target"]
    right = target if isinstance(target, int) and 0 <= target < len(weighed) else chosen
    return choices[chosen].strip(), abs(lead_of(weighed, right)), weighed


def lead_of(scores: Sequence[float], choice: int) -> float:
    """The score of a choice less the best other one's."""
    return scores[choice] - max(score for place, score in enumerate(scores) if place != choice)


def _choices(task: Any, line: Sample) -> list[str]:
    """The choices of a document. As many requests without a prompt may follow them (mutual information)."""
    texts = _try(lambda: task.doc_to_choice(line["doc"])) if len(line["arguments"]) > 1 else None
    fits = isinstance(texts, list) and len(line["arguments"]) in (len(texts), 2 * len(texts))
    return [str(item) for item in texts or ()] if fits else []


def _try(call: Callable[[], Any]) -> Any:
    """Empty where a task's own code fails on what it was not made for."""
    try:
        return call()
    except ANY_FAILURE:  # whatever a task's functions throw
        return None


_KEY_BYTES = 4
"""Bytes of a digest. With 32 bits, one of 4,000 changed documents passes for an earlier one in a millionth of cases."""

_MOST_BYTES = 1 << 26
"""The most bytes of packed numbers, 8 million documents: a larger file is not ours."""


def packed(answers: Iterable[Answers]) -> tuple[PackedAnswers, ...]:
    """The answers of tasks by which two models can be compared."""
    return tuple(_packed(keyed(item)) for item in answers if any(one.values for one in item.by_document.values()))


def unpacked(kept: Sequence[PackedAnswers]) -> list[Answers]:
    """The answers, under short digests. Raises `ValueError` where packed numbers are not `num_documents`, and where a
    task's filter occurs twice."""
    names = [(item.task, item.filter) for item in kept]
    if twice := [item for item in names if names.count(item) > 1]:
        raise ValueError(f"documents: '{twice[0][0]}' by filter '{twice[0][1]}' is there twice")
    return [_unpacked(item) for item in kept]


def keyed(answers: Answers) -> Answers:
    """The answers under short digests."""
    short = {}
    for number, item in answers.by_document.items():
        digests = (hashlib.sha256(item.digest.split(" ", 1)[part].encode()).hexdigest() for part in (0, -1))
        short[number] = replace(item, digest=" ".join(digest[: 2 * _KEY_BYTES] for digest in digests))
    return replace(answers, by_document=short)


def _packed(answers: Answers) -> PackedAnswers:
    documents = answers.by_document
    margins = [item.margin for item in documents.values()]
    known = sorted({name for item in documents.values() for name in item.values})
    values = {
        metric: _text(np.array([item.values.get(metric, np.nan) for item in documents.values()], "<f8"))
        for metric in dict.fromkeys([*answers.metrics, *([NATS, UNITS] if answers.text_metric else []), *known])
    }
    with np.errstate(over="ignore"):
        narrow = None if None in margins else _text(np.array(margins, "<f8").astype("<f2"))
    return PackedAnswers(
        task=answers.task,
        filter=answers.filter,
        higher_is_better=answers.metrics,
        num_documents=len(documents),
        numbers=_text(np.array(list(documents), "<u4")),
        keys=_text(np.frombuffer(bytes.fromhex("".join(item.digest for item in documents.values())), "u1")),
        values=values,
        text_metric=answers.text_metric,
        margins=narrow,
    )


def _unpacked(kept: PackedAnswers) -> Answers:
    name, count = f"documents of '{kept.task}'", kept.num_documents
    if not {*kept.higher_is_better, *([NATS, UNITS] if kept.text_metric else [])} <= {*kept.values}:
        raise ValueError(f"{name}: 'values' lacks metrics of 'higher_is_better'")
    numbers = _array(kept.numbers, "<u4", count, f"{name}: 'numbers'").tolist()
    keys = _array(kept.keys, "u1", 2 * count * _KEY_BYTES, f"{name}: 'keys'").reshape(-1, 2, _KEY_BYTES)
    values = {
        metric: _array(text, "<f8", count, f"{name}: 'values.{metric}'").tolist()
        for metric, text in kept.values.items()
    }
    margins: list[Any] = [None] * count
    if kept.margins is not None:
        margins = _array(kept.margins, "<f2", count, f"{name}: 'margins'").tolist()
    answers = {
        number: DocumentAnswer(
            digest=" ".join(key.tobytes().hex() for key in keys[place]),
            values={metric: column[place] for metric, column in values.items() if column[place] == column[place]},
            text="",
            margin=margins[place],
        )
        for place, number in enumerate(numbers)
    }
    if len(answers) != count:
        raise ValueError(f"{name}: 'numbers' has a document twice")
    return Answers(kept.task, kept.filter, kept.higher_is_better, answers, kept.text_metric)


def _text(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()


def _array(text: str, dtype: str, count: int, what: str) -> npt.NDArray[Any]:
    try:
        unfolded = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{what} cannot be unpacked ({error})") from error
    if len(unfolded) != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{what} is not of {count} documents")
    return np.frombuffer(unfolded, dtype)
