"""Whether several reports may stand in one table: the same tasks, asked in the same way. Pure functions of reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from olive_ext.errors import ConfigError
from olive_ext.report.report import Report

Named = tuple[str, Report]

_MEANING = (
    "output_type", "dataset_path", "dataset_name", "test_split", "validation_split", "fewshot_split", "doc_to_text",
    "doc_to_target", "doc_to_choice", "process_docs", "process_results", "description", "target_delimiter",
    "fewshot_delimiter", "gen_prefix", "fewshot_config", "generation_kwargs", "repeats", "filter_list", "metric_list",
)  # fmt: skip
"""Keys of an lm-eval task's configuration that change what is asked or how it is scored. Not among them: paths, and the
functions that load data, whose texts differ from machine to machine."""

_TEMPLATE = ("apply_chat_template", "system_instruction", "fewshot_as_multiturn")
_MOST_TOLD = 3
_MOST_SHOWN = 60


def check_comparable(reports: Sequence[Named]) -> None:
    """Raises `ConfigError` where a task that two of the reports have was not asked or scored in the same way.

    Looked at are the task's version, examples in the prompt, number of documents, hash of the task (where lm-eval gave
    one), its configuration, chat template and system prompt, generation settings, the seed of the examples, and for
    tasks that score whole texts the longest context.
    """
    found = [problem for task in _tasks(reports) for problem in _problems(task, reports)]
    if found:
        more = f"; and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        raise ConfigError(f"cannot compare {'; '.join(found[:_MOST_TOLD])}{more}")


def _tasks(reports: Sequence[Named]) -> list[str]:
    return list(dict.fromkeys(task for _, report in reports for task in report.results.get("configs", {})))


def _problems(task: str, reports: Sequence[Named]) -> Iterator[str]:
    """One line for each thing that differs, with the first two reports that differ in it."""
    told = [(name, dict(_asked(task, report))) for name, report in reports if task in report.results.get("configs", {})]
    for key in dict.fromkeys(key for _, facts in told for key in facts):
        first_name, first = told[0]
        for name, facts in told[1:]:
            if key in facts and key in first and facts[key] != first[key]:
                yield (
                    f"task '{task}': {key} is {_shown(first[key])} in '{first_name}' and {_shown(facts[key])} "
                    f"in '{name}'"
                )
                break


def _asked(task: str, report: Report) -> Iterator[tuple[str, Any]]:
    results = report.results
    yield "version", results.get("versions", {}).get(task)
    shots = results.get("n-shot", {}).get(task)
    yield "number of examples", shots
    yield "number of documents", results.get("n-samples", {}).get(task, {}).get("effective")
    if task in results.get("task_hashes", {}):
        yield "hash", results["task_hashes"][task]
    configuration = results.get("configs", {}).get(task) or {}
    for key in _MEANING:
        yield key, configuration.get(key)
    for key in _TEMPLATE:
        yield key, report.config.get(key) or None
    yield "chat_template_args", (report.config.get("model_args") or {}).get("chat_template_args")
    if results.get("chat_template_sha"):
        yield "chat_template_sha", results["chat_template_sha"]
    if shots:
        yield "seed of the examples", results.get("config", {}).get("fewshot_seed")
    if configuration.get("output_type") == "loglikelihood_rolling":
        yield "longest context", results.get("max_length")


def _shown(value: Any) -> str:
    """Both ends of a long value: templates differ at either."""
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN // 2]}…{text[-_MOST_SHOWN // 2 :]}"
    return repr(text) if isinstance(value, str) else text


def short_names(paths: Sequence[Sequence[str]]) -> list[str]:
    """A name for each report from the parts of its folder's path: the last, or as many as tell it from the others."""
    for count in range(1, max((len(parts) for parts in paths), default=0) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts)} ({place})" for place, parts in enumerate(paths, 1)]


def facts_of(report: Report) -> Mapping[str, Any]:
    """What identifies the model that a report is on."""
    return {key: report.model[key] for key in ("path", "kind", "content_hash") if key in report.model}
