"""One run of lm-eval: from a model and loaded tasks to results and samples. Knows no kind of model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

from olive_ext.backends.code_eval import CODE, loading_metrics, programs_at_once
from olive_ext.backends.lm_eval.instances import answered_documents
from olive_ext.backends.lm_eval_patches import (
    exits_raised,
    media_of_shots,
    no_code_of_the_working_directory,
    quiet_bars,
    sandboxed_templates,
)
from olive_ext.backends.samples import drop_shares
from olive_ext.backends.task_checks import checked_documents
from olive_ext.backends.task_files import helpers_of
from olive_ext.backends.task_loading import LoadedTasks, Seeds
from olive_ext.config import EvaluationSettings
from olive_ext.errors import ConfigError, RecordsError, UnsupportedError, named_failures
from olive_ext.model.files.content import digest_of
from olive_ext.report.page import TASK_HELPERS, TEMPLATE_DATE
from olive_ext.session.bounded_templates import bounded_chat_templates, replaced

_PASSED_ON = (
    *("num_fewshot", "limit", "bootstrap_iters", "apply_chat_template", "system_instruction", "fewshot_as_multiturn"),
    *("batch_size", "device", "confirm_run_unsafe_code"),
)
"""Settings that lm-eval takes under the same names."""

__all__ = ["LM", "run_tasks", "sample_line"]


def run_tasks(
    lm: LM,
    tasks: LoadedTasks,
    settings: EvaluationSettings,
    *,
    seeds: Seeds,
    progress: bool = False,
) -> dict[str, Any]:
    """lm-eval's results with `samples`, and where a chat template is applied with its SHA-256 as `chat_template_sha`,
    and the date that it prints. Raises `TaskError` where a task, its data or a setting cannot be evaluated, `RunError`
    where the machine fails.
    """
    with (
        named_failures("the evaluation stopped"),
        exits_raised(),
        sandboxed_templates(),
        checked_documents(),
        media_of_shots(),
        no_code_of_the_working_directory(),
        loading_metrics(settings.confirm_run_unsafe_code),
        quiet_bars(progress),
        chosen_template(getattr(lm, "tokenizer", None), settings.apply_chat_template),
        bounded_chat_templates(),
        answered_documents(tasks.tasks, getattr(lm, "lost", ())),
        programs_at_once(tasks.tasks) as confined,
    ):
        # Empty where a server applies it, so that it is not known.
        template = (lm.chat_template(True) if settings.apply_chat_template else None) or ""
        is_dated = "strftime_now" in template
        with _records_of_a_day(is_dated):
            results: dict[str, Any] = lm_eval.simple_evaluate(
                model=lm,
                tasks=list(tasks.tasks),
                task_manager=tasks,
                log_samples=True,
                gen_kwargs=dict(settings.gen_kwargs) or None,
                **{name: getattr(settings, name) for name in _PASSED_ON},
                **asdict(seeds),
            )
        drop_shares(results)
        helpers = {name: helpers_digest(vars(task.config)) for name, task in tasks.tasks.items()}
        results |= {TASK_HELPERS: known} if (known := {name: one for name, one in helpers.items() if one}) else {}
        results |= {CODE: confined} if confined else {}
        if settings.apply_chat_template:
            results["chat_template_sha"] = hash_string(template) if template else None
            results |= {TEMPLATE_DATE: str(date.today())} if is_dated else {}
    return results


def helpers_digest(config: Mapping[str, Any]) -> str:
    """Digest of the files that the Python of a task's own, which is in its configuration, imports from beside it; empty
    where it imports none, and of installed packages."""
    waiting, files = list[Any]([config]), set[Path]()
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if (code := getattr(value, "__code__", None)) is not None and "-packages" not in code.co_filename:
            files.add(Path(code.co_filename))
    modules = {one.name: one for file in files for one in helpers_of(file)}
    return digest_of(sorted(modules.items())) if modules else ""


@contextmanager
def _records_of_a_day(is_dated: bool) -> Iterator[None]:
    """Requests that records lack have a reason where the chat template prints the date."""
    try:
        yield
    except RecordsError as error:
        if not is_dated or "record the reference" not in str(error):
            raise
        reason = "the chat template prints the date (strftime_now), so that its records are of one day"
        raise RecordsError(f"{error}; {reason}") from error


@contextmanager
def chosen_template(tokenizer: Any, name: bool | str) -> Iterator[None]:
    """Selects the chat template `name` of a tokenizer that has several: lm-eval only reports the name, and transformers
    uses an unknown name as the template itself. Raises `ConfigError` for a name that the tokenizer lacks."""
    written: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(name, bool):
        if name and tokenizer is not None and not written:
            folder = getattr(tokenizer, "name_or_path", "")
            raise UnsupportedError(f"the tokenizer in '{folder}' has no chat template", "apply_chat_template")
        yield
        return
    templates: dict[str, str] = written if isinstance(written, dict) else {}
    names = sorted(templates)
    if tokenizer is None or name not in names:
        known = f"one of {names}, or true" if names else "true: the tokenizer has no templates with names"
        raise ConfigError(f"give {known}", "apply_chat_template", name)
    with replaced(tokenizer, "chat_template", templates[name]):
        yield


def sample_line(sample: Mapping[str, Any]) -> str:
    """One logged sample as a JSON line, in the form of lm-eval's own samples_*.jsonl."""
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(values)}
        for i, values in enumerate(sample["arguments"])
    }
    line = {
        **sample,
        "resps": sanitize_list(sample["resps"]),
        "filtered_resps": sanitize_list(sample["filtered_resps"]),
        "arguments": arguments,
        "target": str(sample["target"]),
    }
    return json.dumps(line, default=handle_non_serializable, ensure_ascii=False) + "\n"
