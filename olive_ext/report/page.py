"""The content of a page: models, comparisons of pairs of them, and whether their tasks are alike.

Plain data and pure functions of reports; knows no table and no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from olive_ext.errors import NotComparableError
from olive_ext.report.comparison import NAME, VARIANT, Comparison
from olive_ext.report.metrics import Metric, read_metrics
from olive_ext.report.report import Report
from olive_ext.report.verdict import Reason, Verdict, verdict

SIZE = "size_bytes"
"""Key of `Report.model` and of a comparison's reference: the bytes of the model's files, where these are known."""

PASSES = "passes"
"""Key of `Report.model`: the names of the passes that made the measured model, in order."""

COMPARISON = "Comparison"
"""The kind of a page that holds earlier reports side by side."""

_MEANING = (
    "output_type", "dataset_path", "dataset_name", "test_split", "validation_split", "fewshot_split", "doc_to_text",
    "doc_to_target", "doc_to_choice", "process_docs", "process_results", "description", "target_delimiter",
    "fewshot_delimiter", "gen_prefix", "fewshot_config", "generation_kwargs", "repeats", "filter_list", "metric_list",
)  # fmt: skip
"""Keys of an lm-eval task's configuration that change the requests or how they are scored. Paths, and the functions
that load data, are not among them, because their texts differ between machines."""

TEMPLATE_DATE = "chat_template_date"
"""Key of results: the day of the run, where the chat template prints it (`strftime_now`)."""

TASK_HELPERS = "task_helpers"
"""Key of results: by task a digest of the Python files that its own code imports from beside it, if any."""

LONGEST_CONTEXT = "longest context"
"""The fact of a task that scores whole texts: in how many tokens at once, by which perplexities differ."""

_TEMPLATE = ("apply_chat_template", "system_instruction", "fewshot_as_multiturn")
_MOST_NAMED = 3
_MOST_SHOWN = 60


@dataclass(frozen=True)
class Column:
    """One model's column of the table."""

    name: str
    metrics: tuple[Metric, ...]
    report: Report | None = None
    """The model's report; None for a reference with known metrics and no report."""

    size: float | None = None
    """Bytes of the model's files, where they are known."""


@dataclass(frozen=True)
class ComparedModels:
    """A candidate against a reference."""

    candidate: str
    reference: str
    comparison: Comparison
    note: str = ""
    """A remark without which the comparison would be misread; may be empty."""

    is_of_another: bool = False
    """Whether the comparison's divergences are from another model than `reference`."""

    broken: tuple[Reason, ...] = ()
    """The bounds of this comparison that are broken."""

    is_of_reports: bool = False
    """Whether it was made of earlier reports, by a command that takes no settings."""

    @property
    def for_verdict(self) -> Comparison:
        """The comparison that the verdict is on: without divergences from another model."""
        return replace(self.comparison, divergences=()) if self.is_of_another else self.comparison

    @property
    def verdict(self) -> Verdict:
        """The verdict on it."""
        judged = verdict(self.for_verdict, self.broken)
        step = judged.next_step
        is_of_settings = self.is_of_reports and step and "`olive-ext " not in step
        return replace(judged, next_step=f"with `olive-ext evaluate`: {step}") if is_of_settings else judged


@dataclass(frozen=True)
class Page:
    """Columns in reading order, the baseline first, and the comparisons between them."""

    title: str
    columns: tuple[Column, ...]
    compared: tuple[ComparedModels, ...] = ()
    created: str = ""
    kind: str = "Evaluation"


def page_of(report: Report) -> Page:
    """The page of one evaluation: its model, and its reference in front where it has one."""
    candidate = column_of(model_name(report), report)
    comparison = report.comparison
    if comparison is None:
        return Page(candidate.name, (candidate,), created=report.created)
    name = str(comparison.reference.get(NAME) or _short_name(comparison.reference, "reference"))
    if name == candidate.name:
        name = f"{name} (reference)"
    reference = Column(name, read_metrics(comparison.metrics), size=comparison.reference.get(SIZE))
    models = ComparedModels(candidate.name, name, comparison, broken=report.broken)
    return Page(f"{candidate.name} against {name}", (reference, candidate), (models,), report.created)


def column_of(name: str, report: Report) -> Column:
    """The column of a report."""
    return Column(name, report.metrics, report, report.model.get(SIZE))


def model_name(report: Report) -> str:
    """The model's name for people, else the passes that made it, else the distinguishing part of its path."""
    return str(report.model.get(NAME) or "") or joined_passes(report, " → ") or _short_name(report.model, "model")


def joined_passes(report: Report, arrow: str) -> str:
    """The names of the passes that made the model; empty where the report does not know them."""
    passes = report.model.get(PASSES)
    return (arrow.join(map(str, passes)) or "input model") if isinstance(passes, list | tuple) else ""


def _short_name(facts: Mapping[str, Any], unknown: str) -> str:
    """The last part of a model's path, with the one before it where it is a file's or folder's usual name; and the
    model's variant."""
    path = str(facts.get("path", unknown))
    parts = PurePath(path.replace("\\", "/")).parts
    is_usual = parts[-1:] and parts[-1] in ("model", "model.onnx", "output_model", "models", "onnx")
    name = "/".join(parts[-2:] if is_usual else parts[-1:]) or path
    return f"{name} ({facts[VARIANT]})" if VARIANT in facts else name


def check_comparable(runs: Sequence[tuple[str, Report | Mapping[str, Mapping[str, Any]]]]) -> None:
    """Raises `NotComparableError` where a task that two of the named runs have differs in its requests or its scoring.

    Compared are the task's version, examples in the prompt, number of documents and which were drawn, its
    configuration, chat template and system prompt, generation settings, the seed of the examples, the longest context
    that was asked for, and for tasks that score whole texts the model's. A mapping has some of these by task.
    """
    if problems := [*_problems([(name, _by_task(run) if isinstance(run, Report) else run) for name, run in runs])]:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise NotComparableError(f"cannot compare {'; '.join(problems[:_MOST_NAMED])}{more}")


def _problems(runs: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]]) -> Iterator[str]:
    """One line for each fact of a task that differs, with the first run and the first that differs from it."""
    for task in dict.fromkeys(task for _, facts in runs for task in facts):
        (first_name, first), *others = ((name, facts[task]) for name, facts in runs if task in facts)
        for key, value in first.items():
            for name, other in [(name, facts[key]) for name, facts in others if facts.get(key, value) != value][:1]:
                yield f"task '{task}': {key} is {_shown(value)} in '{first_name}' and {_shown(other)} in '{name}'"


def _by_task(report: Report) -> dict[str, dict[str, Any]]:
    return {task: dict(_facts(task, report)) for task in report.results.get("configs", {})}


def _facts(task: str, report: Report) -> Iterator[tuple[str, Any]]:
    """The facts that decide the task's requests and their scoring; a fact that a report may lack is left out."""
    results = report.results
    yield "version", results.get("versions", {}).get(task)
    shots = results.get("n-shot", {}).get(task)
    yield "number of examples", shots
    yield "number of documents", results.get("n-samples", {}).get(task, {}).get("effective")
    certainty = None if report.comparison is None else report.comparison.certainty
    yield "sample of documents", "all" if certainty is None else certainty.sample
    configuration: Mapping[str, Any] = results.get("configs", {}).get(task) or {}
    yield from ((key, configuration.get(key)) for key in _MEANING)
    yield from ((key, report.config.get(key) or None) for key in (*_TEMPLATE, "max_length"))
    yield "chat_template_args", (report.config.get("model_args") or {}).get("chat_template_args")
    yield from ((key, results[key]) for key in ("chat_template_sha", TEMPLATE_DATE) if results.get(key))
    if shots:
        yield "seed of the examples", results.get("config", {}).get("fewshot_seed")
    if configuration.get("output_type") == "loglikelihood_rolling":
        yield LONGEST_CONTEXT, results.get("max_length")


def _shown(value: Any) -> str:
    """Shortens a long value to both of its ends: chat templates differ at either."""
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN // 2]}…{text[-_MOST_SHOWN // 2 :]}"
    return repr(text) if isinstance(value, str) else text
