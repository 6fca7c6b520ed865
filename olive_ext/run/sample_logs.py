"""Sample logs: a file of lm-eval's JSON lines for each task, written with our own fields, and read back as samples.

Knows no task's code. A file is replaced as a whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from olive_ext.errors import ConfigError, NotComparableError, one_line
from olive_ext.report import Report, write_texts
from olive_ext.report.metrics import LENGTHS, MEANS, is_of_samples
from olive_ext.run.reference.answers import OWN, Answers, Sample, question_of, read_answers, share_cut_off

Fields: TypeAlias = Callable[[str, Sample], Mapping[str, Any]]
"""Our own fields of a line, from the task's name and the sample."""

_SAME = 1e-6


def sample_fields(
    tasks: Mapping[str, Any],
    reference: Sequence[Answers] = (),
    by_document: Callable[[str], Mapping[int, tuple[float, int]]] | None = None,
    candidate: Sequence[Answers] = (),
) -> Fields:
    """`question` without examples; the `reasoning` in front of each response of `resps`; of generated answers the share
    that was `cut_off` by their limit; with a reference its
    `reference_answer` and `reference_values` by metric; where distributions were compared `kl_mean` in nats over the
    document's `positions`, which `by_document` gives of a task; of choices both models' `margins`, the score of the
    reference's answer less the best other one's, by the `candidate`'s answers.

    `tasks` are lm-eval's objects by name.
    """
    answers, mine = ({(item.task, item.filter): item.by_document for item in own} for own in (reference, candidate))
    distances = {task: by_document(task) for task in tasks} if by_document is not None else {}

    def fields(task: str, sample: Sample) -> dict[str, Any]:
        number = int(sample["doc_id"])
        added: dict[str, Any] = {"question": question_of(tasks[task], sample)}
        thoughts = [[getattr(item, "reasoning", None) for item in items] for items in sample["resps"]]
        if any(text is not None for items in thoughts for text in items):
            added["reasoning"] = thoughts
        if (cut_off := share_cut_off(sample)) is not None:
            added[LENGTHS[-1]] = cut_off
        answer = answers.get((task, str(sample["filter"])), {}).get(number)
        if answer is not None:
            added |= {"reference_answer": answer.text, "reference_values": dict(answer.values)}
        if (distance := distances.get(task, {}).get(number)) is not None:
            added |= {"kl_mean": distance[0], "positions": distance[1]}
        own = mine.get((task, str(sample["filter"])), {}).get(number)
        if answer is not None and own is not None and 1 < len(answer.scores) == len(own.scores):
            best = answer.scores.index(max(answer.scores))
            added["margins"] = {"reference": answer.lead_of(best), "candidate": own.lead_of(best)}
        return added

    return fields


def write_samples(
    samples: Mapping[str, Sequence[Sample]], num_documents: int, folder: Path, fields: Fields | None = None
) -> list[Path]:
    """Writes `samples_<task>.jsonl` with the first `num_documents` documents of each task; returns the paths.

    A document has a line for each of the task's filters, in lm-eval's own sample format; where `fields` has something
    to add, it stands under the key `OWN`. Raises `RunError` where the disk refuses.
    """
    from olive_ext.backends.lm_eval_run import sample_line

    texts = {}
    for task, lines in samples.items():
        documents = set(sorted({line["doc_id"] for line in lines})[:num_documents])
        chosen = [line for line in lines if line["doc_id"] in documents]
        own = [fields(task, line) if fields is not None else {} for line in chosen]
        added = [{**line, OWN: more} if more else line for line, more in zip(chosen, own, strict=True)]
        texts[log_path(folder, task)] = "".join(map(sample_line, added))
    write_texts(texts, folder, "the sample logs")
    return list(texts)


def log_path(folder: Path, task: str) -> Path:
    """Path of the log of a task."""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task)
    return folder / f"samples_{name}.jsonl"


@dataclass(frozen=True)
class LoggedTask:
    """Stands in for lm-eval's task object, as far as answers need it. A sample's `doc` is its whole line here."""

    directions: Mapping[str, bool]
    means: tuple[str, ...]

    def aggregation(self) -> dict[str, str]:
        """lm-eval's name of the mean for each metric that is one."""
        return dict.fromkeys(self.means, "mean")

    def higher_is_better(self) -> Mapping[str, bool]:
        """Each metric's direction."""
        return self.directions

    def doc_to_text(self, line: Mapping[str, Any]) -> str:
        """The question without examples, where the line has our own field for it."""
        return str(line.get(OWN, {}).get("question", ""))

    def doc_to_choice(self, line: Mapping[str, Any]) -> list[str]:
        """The scored continuations; of tasks with one continuation after several contexts, the contexts' ends."""
        pairs = [list(arguments.values()) for arguments in line["arguments"].values()]
        continuations = [str(pair[1]).strip() for pair in pairs]
        if len(set(continuations)) > 1 or len(pairs) < 2:
            return continuations
        return [str(pair[0]).rpartition("\n")[2] for pair in pairs]


@dataclass(frozen=True)
class Logs:
    """Logged samples by task, and the stand-ins for lm-eval's tasks."""

    samples: Mapping[str, Sequence[Sample]]
    tasks: Mapping[str, LoggedTask]

    def shared_with(self, other: Logs) -> Logs:
        """The documents that are in both logs, which may be of different lengths."""
        samples = {}
        for task in self.samples.keys() & other.samples.keys():
            theirs = {(line["doc_id"], line["filter"]) for line in other.samples[task]}
            samples[task] = [line for line in self.samples[task] if (line["doc_id"], line["filter"]) in theirs]
        ordered = {task: samples[task] for task in sorted(samples) if samples[task]}
        return Logs(ordered, self.tasks)

    def check_of(self, report: Report, folder: Path) -> None:
        """Raises `ConfigError` where complete logs give other numbers than the report, as those of a later run do."""
        reported = {(item.task, item.metric, item.filter): item for item in report.metrics}
        for answers in self.answers():
            for metric in answers.metrics:
                known = reported.get((answers.task, metric, answers.filter))
                values = [item.values[metric] for item in answers.by_document.values() if metric in item.values]
                if known is None or known.num_population is not None or known.n != len(values):
                    continue
                mean = math.fsum(values) / len(values)
                if abs(mean - known.value) > _SAME:
                    raise NotComparableError(
                        f"'{log_path(folder, answers.task)}' is of another run than the report beside it: {metric} is "
                        f"{mean:.4f} there and {known.value:.4f} in the report"
                    )

    def answers(self) -> list[Answers]:
        """The answers of the logged samples."""
        return read_answers(self.samples, self.tasks)


def read_logs(folder: Path, report: Report) -> Logs:
    """The logs of the report's tasks in `folder`, empty without any. Raises `ConfigError` for a broken file."""
    configs: Mapping[str, Any] = report.results.get("configs", {})
    files = {task: log_path(folder, task) for task in configs}
    samples = {}
    for task, file in ((task, file) for task, file in files.items() if file.is_file()):
        texts = filter(None, file.read_text(encoding="utf-8").split("\n"))  # JSON holds other separators as they are
        samples[task] = [_line(file, number, text, configs[task] or {}) for number, text in enumerate(texts, 1)]
    return Logs(samples, {task: _task(task, report) for task in samples})


def _line(file: Path, number: int, text: str, config: Mapping[str, Any]) -> Sample:
    try:
        return _restored(json.loads(text), config)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"'{file}', line {number}: not lm-eval's sample ({one_line(error)})", code="damaged"
        ) from error


def _restored(line: Sample, config: Mapping[str, Any]) -> Sample:
    """lm-eval writes every response as a text, and arguments under names."""
    target = line["target"]
    if config.get("output_type") == "multiple_choice" and str(target).lstrip("-").isdigit():
        target = int(target)
    return {
        **line,
        "doc": line,
        "target": target,
        "arguments": [tuple(arguments.values()) for arguments in line["arguments"].values()],
        "resps": [  # a choice's is its log-probability, and whether it was the most likely
            [
                (float(item[0]), item[1] == "True") if isinstance(item, list) and len(item) == 2 else item
                for item in items
            ]
            for items in line["resps"]
        ],
    }


def _task(task: str, report: Report) -> LoggedTask:
    """Metrics without an aggregation of their own are lm-eval's means."""
    listed = report.results["configs"][task].get("metric_list") or []
    means = [str(item["metric"]) for item in listed if item.get("aggregation", "mean") in MEANS]
    means += [item.metric for item in report.metrics if item.task == task and is_of_samples(item.metric)]
    directions = report.results.get("higher_is_better", {}).get(task) or {}
    return LoggedTask(directions, tuple(dict.fromkeys(means)))
