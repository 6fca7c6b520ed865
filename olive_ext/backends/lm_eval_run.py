"""One run of lm-eval: from a model and loaded tasks to results and samples. Also a run over known answers, for
lm-eval's own aggregation. Knows no kind of model."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import date
from operator import attrgetter
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import LM as LM
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

from olive_ext.backends.code_eval import CODE, loading_metrics, programs_at_once
from olive_ext.backends.evaluated_task import drop_shares
from olive_ext.backends.lm_eval.instances import LostRequests
from olive_ext.backends.lm_eval_patches import (
    exits_raised,
    no_code_of_the_working_directory,
    quiet_bars,
    sandboxed_templates,
)
from olive_ext.backends.task_checks import named_aggregations
from olive_ext.backends.task_files import helpers_of
from olive_ext.backends.task_loading import LoadedTasks
from olive_ext.config import EvaluationSettings
from olive_ext.errors import named_failures
from olive_ext.model.files.content import digest_of
from olive_ext.report.page import TASK_HELPERS, TEMPLATE_DATE
from olive_ext.session.tokenizer_fit import chosen_template

_PASSED_ON = (
    *("num_fewshot", "limit", "bootstrap_iters", "apply_chat_template", "system_instruction", "fewshot_as_multiturn"),
    *("batch_size", "device", "confirm_run_unsafe_code"),
)
"""Settings that lm-eval takes under the same names."""


def run_tasks(lm: LM, tasks: LoadedTasks, settings: EvaluationSettings, *, progress: bool = False) -> dict[str, Any]:
    """lm-eval's results with `samples`, and where a chat template is applied its SHA-256 as `chat_template_sha`, and
    the date that it prints. Raises `TaskError` for a task, data or a setting, `RunError` where the machine fails."""
    with (
        named_failures("the evaluation stopped"),
        exits_raised(),
        sandboxed_templates(),
        named_aggregations(),
        no_code_of_the_working_directory(),
        loading_metrics(settings.confirm_run_unsafe_code),
        quiet_bars(progress),
        chosen_template(getattr(lm, "tokenizer", None), settings.apply_chat_template),
        programs_at_once(tasks.tasks) as confined,
    ):
        lost = getattr(lm, "lost", ())
        if isinstance(lost, LostRequests):
            lost.is_read = True
        for task in tasks.tasks.values():
            task.lost = lost
        # Empty where a server applies it, so that it is not known.
        template = (lm.chat_template(True) if settings.apply_chat_template else None) or ""
        is_dated = "strftime_now" in template
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=lm,
            tasks=list(tasks.tasks),
            task_manager=tasks,
            log_samples=True,
            gen_kwargs=dict(settings.gen_kwargs) or None,
            **{name: getattr(settings, name) for name in _PASSED_ON},
            **tasks.seeds,
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
    """Digest of the files that a task's own Python, which is in its configuration, imports from its folder; empty
    without any, and for installed packages."""
    waiting, files = list[Any]([config]), set[Path]()
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if (code := getattr(value, "__code__", None)) is not None and "-packages" not in code.co_filename:
            files.add(Path(code.co_filename))
    modules = {one.name: one for file in files for one in helpers_of(file)}
    return digest_of(sorted(modules.items())) if modules else ""


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


class AnsweredRequests(LM):  # type: ignore[misc]
    """Stands in for `lm`: answers each request as it was answered in lm-eval's `samples`."""

    tokenizer_name = property(attrgetter("_lm.tokenizer_name"))  # lm-eval's own class refuses chat templates
    apply_chat_template = property(attrgetter("_lm.apply_chat_template"))
    chat_template = property(attrgetter("_lm.chat_template"))

    def __init__(self, lm: Any, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        super().__init__()
        self._lm = lm
        self._answers: defaultdict[tuple[str, int, str], deque[Any]] = defaultdict(deque)
        for task, lines in samples.items():
            for line in lines:
                for arguments, answers in zip(line["arguments"], line["resps"], strict=True):
                    self._answers[task, int(line["doc_id"]), repr(arguments)].extend(answers)

    def __getattr__(self, name: str) -> Any:
        """What lm-eval reports of a model besides its answers."""
        return getattr(self._lm, name)

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[Any]:
        """The answers of the samples, whatever the requests are for."""
        return [self._answers[item.task_name, item.doc_id, repr(item.args)].popleft() for item in requests]

    loglikelihood_rolling = loglikelihood
    generate_until = loglikelihood
