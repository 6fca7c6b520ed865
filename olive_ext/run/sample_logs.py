"""Sample logs read back: lm-eval's JSON lines as the samples that they were written from. Knows no task's code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.errors import ConfigError
from olive_ext.report import Report
from olive_ext.run.samples import OWN, log_path

if TYPE_CHECKING:
    from olive_ext.backends.answers import Answers

Sample = dict[str, Any]

_SAME = 1e-6
_NUMBERS_OF_A_CHOICE = 2
"""A choice's response is its log-probability and whether it was the most likely."""


@dataclass(frozen=True)
class LoggedTask:
    """Stands in for lm-eval's task object, as far as answers need it. A sample's `doc` is its whole line here."""

    directions: Mapping[str, bool]
    means: tuple[str, ...]
    multiple_input: int = 0

    def aggregation(self) -> dict[str, str]:
        return dict.fromkeys(self.means, "mean")

    def higher_is_better(self) -> Mapping[str, bool]:
        return self.directions

    def doc_to_text(self, line: Mapping[str, Any]) -> str:
        """The question without examples, where our log has it."""
        return str(line.get(OWN, {}).get("question", ""))

    def doc_to_choice(self, line: Mapping[str, Any]) -> list[str]:
        """What was scored; of tasks with one continuation behind several contexts, the contexts' ends."""
        pairs = [list(arguments.values()) for arguments in line["arguments"].values()]
        continuations = [str(pair[1]).strip() for pair in pairs]
        if len(set(continuations)) > 1 or len(pairs) < 2:
            return continuations
        return [str(pair[0]).rpartition("\n")[2] for pair in pairs]


@dataclass(frozen=True)
class Logs:
    """Logged samples by task, and what stands for the tasks."""

    samples: Mapping[str, Sequence[Sample]]
    tasks: Mapping[str, LoggedTask]

    def shared_with(self, other: Logs) -> Logs:
        """The documents that both have logged; logs may be of different lengths."""
        samples = {}
        for task in self.samples.keys() & other.samples.keys():
            theirs = {(line["doc_id"], line["filter"]) for line in other.samples[task]}
            samples[task] = [line for line in self.samples[task] if (line["doc_id"], line["filter"]) in theirs]
        ordered = {task: samples[task] for task in sorted(samples) if samples[task]}
        return Logs(ordered, self.tasks)

    def check_of(self, report: Report, folder: Path) -> None:
        """Raises `ConfigError` where whole logs give other numbers than the report: a later run may have left them."""
        reported = {(item.task, item.metric, item.filter): item for item in report.metrics}
        for answers in self.answers():
            for metric in answers.metrics:
                found = reported.get((answers.task, metric, answers.filter))
                values = [item.values[metric] for item in answers.by_document.values() if metric in item.values]
                if found is None or found.n != len(values):
                    continue
                mean = math.fsum(values) / len(values)
                if abs(mean - found.value) > _SAME:
                    raise ConfigError(
                        f"'{log_path(folder, answers.task)}' is of another run than the report beside it: {metric} is "
                        f"{mean:.4f} there and {found.value:.4f} in the report"
                    )

    def answers(self) -> list[Answers]:
        from olive_ext.backends.answers import read_answers

        return read_answers(self.samples, self.tasks)


def read_logs(folder: Path, report: Report) -> Logs:
    """The logs of the report's tasks in `folder`, empty without any. Raises `ConfigError` for a broken file."""
    configs: Mapping[str, Any] = report.results.get("configs", {})
    files = {task: log_path(folder, task) for task in configs}
    samples = {task: _lines(file, configs[task] or {}) for task, file in files.items() if file.is_file()}
    return Logs(samples, {task: _task(task, report) for task in samples})


def _lines(file: Path, config: Mapping[str, Any]) -> list[Sample]:
    return [_line(file, number, text, config) for number, text in enumerate(_texts(file), 1)]


def _line(file: Path, number: int, text: str, config: Mapping[str, Any]) -> Sample:
    try:
        return _restored(json.loads(text), config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"'{file}', line {number}: no sample of lm-eval ({error})") from error


def _texts(file: Path) -> list[str]:
    """Lines that end in a line feed only: JSON holds other separators as they are."""
    return [text for text in file.read_text(encoding="utf-8").split("\n") if text]


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
        "resps": [[_response(item) for item in items] for items in line["resps"]],
    }


def _response(item: Any) -> Any:
    if isinstance(item, list) and len(item) == _NUMBERS_OF_A_CHOICE:
        return float(item[0]), item[1] == "True"
    return item


def _task(task: str, report: Report) -> LoggedTask:
    """Metrics without an aggregation of their own are lm-eval's means."""
    listed = report.results["configs"][task].get("metric_list") or []
    means = tuple(str(item["metric"]) for item in listed if item.get("aggregation", "mean") in ("mean", "nanmean"))
    directions = report.results.get("higher_is_better", {}).get(task) or {}
    return LoggedTask(directions, means)
