"""A model's answers to each document, read from lm-eval's samples and kept small. Knows no model and no session."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from olive_ext.errors import TaskError

_MEANS = ("mean", "nanmean")
_MAX_TEXT = 4000
"""Characters kept of an answer from its beginning, and of a question from its end."""

_LENGTHS: Mapping[str, Callable[[str], int]] = {"acc_norm": len, "acc_bytes": lambda text: len(text.encode())}
"""Metrics for which lm-eval divides a choice's log-probability by its length, and that length."""

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A model's answer to one document under one filter: the values of its metrics, and its text."""

    digest: str
    """lm-eval's digests of document, prompt and target."""

    values: Mapping[str, float]
    text: str


@dataclass(frozen=True)
class Answers:
    """One model's answers to one task by one filter, by document."""

    task: str
    filter: str
    metrics: Mapping[str, bool]
    """Whether higher is better, by metric, in the task's order. Only metrics that are means over documents are here."""

    by_document: Mapping[int, Answer]


def read_answers(samples: Mapping[str, Sequence[Sample]], tasks: Mapping[str, Any]) -> list[Answers]:
    """In lm-eval's order of tasks and filters. `tasks` are its task objects by name."""
    found = []
    for name, lines in samples.items():
        task = tasks[name]
        metrics = _mean_metrics(task)
        for filter_name in dict.fromkeys(line["filter"] for line in lines):
            chosen = [line for line in lines if line["filter"] == filter_name]
            valued = [key for key in metrics if any(_is_value(line.get(key)) for line in chosen)]
            answers = {int(line["doc_id"]): _answer(task, line, valued) for line in chosen}
            found.append(Answers(name, filter_name, {key: metrics[key] for key in valued}, answers))
    return found


def check_same_questions(reference: Answers, candidate: Answers) -> None:
    """Raises `TaskError` where the prompts or documents of two runs of one task differ."""
    first, second = reference.by_document, candidate.by_document
    shared = first.keys() & second.keys()
    differing = [item for item in second if item in shared and first[item].digest != second[item].digest]
    if first.keys() != second.keys() or differing:
        what = f"document {differing[0]}" if differing else "other documents"
        raise TaskError(
            f"task '{candidate.task}' asked the two models differently ({what}), so their answers cannot be compared: "
            "its prompts change from run to run, or the models' chat templates differ"
        )


def question_of(task: Any, sample: Sample) -> str:
    """The document's question without examples, where the task's code gives it; else the prompt."""
    text = _try(lambda: task.doc_to_text(sample["doc"]))
    if isinstance(text, str) and text.strip():
        return text.strip()[-_MAX_TEXT:]
    return _prompt(sample)[-_MAX_TEXT:]


def target_of(task: Any, sample: Sample) -> str:
    """The right answer as a text; several are separated by " | "."""
    target = sample["target"]
    choices = _choices(task, sample)
    has_contexts = bool(getattr(task, "multiple_input", False))
    if choices and has_contexts:
        target = _try(lambda: task.doc_to_text(sample["doc"]))
    targets: Sequence[Any] = target if isinstance(target, list | tuple) else [target]
    named = [choices[item] if isinstance(item, int) and 0 <= item < len(choices) else item for item in targets]
    return " | ".join(str(item).strip() for item in named)[:_MAX_TEXT]


def _mean_metrics(task: Any) -> dict[str, bool]:
    means = {name: function for name, function in task.aggregation().items() if _is_mean(function)}
    directions = task.higher_is_better()
    return {name: directions.get(name) is not False for name in means}


def _is_mean(function: Any) -> bool:
    return (function if isinstance(function, str) else getattr(function, "__name__", "")) in _MEANS


def _is_value(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _answer(task: Any, line: Sample, metrics: Sequence[str]) -> Answer:
    values = {name: float(line[name]) for name in metrics if _is_value(line.get(name))}
    digest = " ".join(str(line[part]) for part in ("doc_hash", "prompt_hash", "target_hash"))
    return Answer(digest, values, _text(task, line, next(iter(metrics), ""))[:_MAX_TEXT])


def _text(task: Any, line: Sample, metric: str) -> str:
    """Of choices the one that `metric` takes for the answer; of a generation its text before any filter; of a single
    target whether it was the most likely."""
    responses = [items[0] if isinstance(items, list | tuple) and items else items for items in line["resps"]]
    scores = [item[0] for item in responses if isinstance(item, tuple | list) and len(item) == 2]
    if len(scores) == len(responses) and scores:
        if len(scores) == 1:
            return f"{'most likely' if responses[0][1] else 'not most likely'} ({scores[0]:.2f} nats)"
        choices = _choices(task, line) or [str(arguments[1]).strip() for arguments in line["arguments"]]
        length = _LENGTHS.get(metric, _one)
        weighed = [score / max(1, length(choice)) for score, choice in zip(scores, choices, strict=False)]
        return choices[weighed.index(max(weighed))].strip()
    return str(responses[0]).strip() if responses else ""


def _one(_: str) -> int:
    return 1


def _choices(task: Any, line: Sample) -> list[str]:
    """The choices of a document; behind the choices may come as many requests without a prompt (mutual information)."""
    found = _try(lambda: task.doc_to_choice(line["doc"])) if len(line["arguments"]) > 1 else None
    fits = isinstance(found, list) and len(line["arguments"]) in (len(found), 2 * len(found))
    return [str(item) for item in found or ()] if fits else []


def _prompt(sample: Sample) -> str:
    return str(sample["arguments"][0][0]).strip() if sample["arguments"] else ""


def _try(call: Callable[[], Any]) -> Any:
    """A task's own code may fail on what it was not made for; then there is nothing to show."""
    try:
        return call()
    except Exception:  # noqa: BLE001
        return None
