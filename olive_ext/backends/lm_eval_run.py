"""One run of lm-eval: from a model and loaded tasks to results and samples. Knows no kind of model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

from olive_ext.backends.journaled_lm import journaled
from olive_ext.backends.lm_eval.lost_requests import answered_documents
from olive_ext.backends.lm_eval_patches import compiled_templates, no_code_of_the_working_directory, quiet_bars
from olive_ext.backends.shot_media import media_of_shots
from olive_ext.backends.task_checks import checked_documents
from olive_ext.backends.task_loading import LoadedTasks, Seeds
from olive_ext.config import EvaluationSettings
from olive_ext.errors import ConfigError, named_failures
from olive_ext.records.journal import Journal
from olive_ext.text.bounded_templates import bounded_chat_templates

__all__ = ["LM", "run_tasks", "sample_line"]


def run_tasks(
    lm: LM,
    tasks: LoadedTasks,
    settings: EvaluationSettings,
    *,
    seeds: Seeds,
    journal: Journal | None = None,
    progress: bool = False,
    log_samples: bool = False,
) -> dict[str, Any]:
    """lm-eval's results; with `samples` where `settings.sample_log_num` is not 0 or `log_samples` is true, and where a
    chat template is applied with its SHA-256 as `chat_template_sha`. A model of lm-eval's own has its answers in
    `journal`. Raises `TaskError` where a task, its data or a setting cannot be evaluated, `RunError` where the machine
    fails.
    """
    with (
        named_failures("the evaluation stopped"),
        built_requests(),
        no_code_of_the_working_directory(),
        quiet_bars(progress),
        chosen_template(getattr(lm, "tokenizer", None), settings.apply_chat_template),
        bounded_chat_templates(),
        answered_documents(tasks.tasks, getattr(lm, "lost", ())),
        journaled(lm, journal) as model,
    ):
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks.tasks),
            task_manager=tasks,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            bootstrap_iters=settings.bootstrap_iters,
            log_samples=log_samples or settings.sample_log_num > 0,
            apply_chat_template=settings.apply_chat_template,
            system_instruction=settings.system_instruction,
            fewshot_as_multiturn=settings.fewshot_as_multiturn,
            gen_kwargs=dict(settings.gen_kwargs) or None,
            batch_size=settings.batch_size,
            device=settings.device,
            **asdict(seeds),
        )
        if settings.apply_chat_template:
            template = lm.chat_template(True)  # empty where a server applies it, so that it is not known
            results["chat_template_sha"] = hash_string(template) if template else None
    return results


@contextmanager
def built_requests() -> Iterator[None]:
    """lm-eval makes requests of documents: fast, of checked ones, and with the pictures and sounds of examples."""
    with compiled_templates(), checked_documents(), media_of_shots():
        yield


@contextmanager
def chosen_template(tokenizer: Any, name: bool | str) -> Iterator[None]:
    """Selects the chat template `name` of a tokenizer that has several: lm-eval only reports the name, and transformers
    uses an unknown name as the template itself. Raises `ConfigError` for a name that the tokenizer lacks."""
    written: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(name, bool):
        if name and tokenizer is not None and not written:
            place = getattr(tokenizer, "name_or_path", "")
            raise ConfigError(f"'apply_chat_template' = true: the tokenizer in '{place}' has no chat template")
        yield
        return
    templates: dict[str, str] = written if isinstance(written, dict) else {}
    names = sorted(templates)
    if tokenizer is None or name not in names:
        known = f"one of {names}, or true" if names else "true: the tokenizer has no templates with names"
        raise ConfigError(f"'apply_chat_template' = {name!r}: give {known}")
    tokenizer.chat_template = templates[name]
    try:
        yield
    finally:
        tokenizer.chat_template = templates


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
