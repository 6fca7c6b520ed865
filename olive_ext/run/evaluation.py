"""`evaluate`: tasks are checked, the model is opened, lm-eval runs, the report is made and written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError
from olive_ext.report import Report, write
from olive_ext.report.comparison import Comparison
from olive_ext.report.metrics import comparison_metrics, read_metrics
from olive_ext.run.costs import asked_costs, asked_tasks, cost_metrics
from olive_ext.run.hardware import describe_hardware
from olive_ext.run.mlflow_log import log_report
from olive_ext.run.opening import answers_key, size_in_bytes
from olive_ext.run.peak_memory import PeakMemory
from olive_ext.run.reference.comparison_run import Comparer
from olive_ext.run.reference.models import Models
from olive_ext.run.reference.modes import comparer_of
from olive_ext.run.sample_logs import sample_fields, write_samples

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks, Seeds


def evaluate(config: EvaluationConfig, *, lm: LM | None = None, progress: bool = False) -> Report:
    """Runs `config` and returns what it found; writes report and sample logs where `config` names folders.

    `lm` stands in for the model that `config` names, and stays open. `progress` shows bars on a terminal. Every failure
    but an interruption is an `OliveExtError`; a task that does not exist is noticed before the model is opened, and
    nothing is written unless all is done.
    """
    from olive_ext.backends.task_loading import Seeds, load_tasks

    log_folder = _log_folder(config)
    names = asked_tasks(config)
    seeds = Seeds.of(config.seed)
    tasks = load_tasks(names, config.include_path, seeds) if names else None
    models = Models(config, progress)
    comparer = None if tasks is None else comparer_of(models, lm, tasks, seeds)
    if comparer is not None:
        comparer.prepare()
    with PeakMemory() as memory:
        begin = time.monotonic()
        opened = _open(models, comparer) if lm is None and tasks is not None else None
        model = lm or opened
        try:
            loaded = time.monotonic()
            results = _run(config, model, tasks, seeds, progress)
            seconds = {"seconds": time.monotonic() - begin, "seconds_load": loaded - begin}
            report = _report(models, model, results, seconds, memory.bytes)
            if comparer is not None and model is not None:
                report = _with_comparison(report, comparer.finish(model, results))
        finally:
            if opened is not None and hasattr(opened, "close"):
                opened.close()
    if log_folder is not None and tasks is not None:
        fields = sample_fields(tasks.tasks) if comparer is None else comparer.fields()
        write_samples(results.get("samples", {}), config.sample_log_num, log_folder, fields)
    if config.output_dir is not None:
        write(report, config.output_dir)
    log_report(report, config.output_dir)
    return report


def _log_folder(config: EvaluationConfig) -> Path | None:
    if not config.sample_log_num:
        return None
    folder = config.sample_log_dir or config.output_dir
    if folder is None:
        raise ConfigError(f"'sample_log_num' = {config.sample_log_num} needs 'sample_log_dir' or 'output_dir'")
    return Path(folder)


def _open(models: Models, comparer: Comparer | None) -> LM:
    return models.candidate(None) if comparer is None else comparer.open()


def _run(
    config: EvaluationConfig, lm: LM | None, tasks: LoadedTasks | None, seeds: Seeds, progress: bool
) -> dict[str, Any]:
    from olive_ext.backends.lm_eval_run import run_tasks

    if lm is None or tasks is None:
        return {"results": {}}
    stem = f"{config.use_cache}_{answers_key(lm)}" if config.use_cache else None
    has_reference = config.reference is not None
    return run_tasks(lm, tasks, config, seeds=seeds, cache_stem=stem, progress=progress, log_samples=has_reference)


def _report(
    models: Models, lm: LM | None, results: Mapping[str, Any], seconds: Mapping[str, float], peak_memory: int
) -> Report:
    from olive_ext.backends.package_versions import versions

    config, session = models.config, getattr(lm, "session", None)
    execution = {} if session is None else dict(session.describe_execution())
    providers = execution.pop("providers", ())
    counters = execution.pop("counters", None) or getattr(lm, "counters", {})
    execution.pop("reference", None)
    costs = cost_metrics(
        asked_costs(config),
        size=lambda: size_in_bytes(models.resolved(lm), lm, config),
        peak_memory=peak_memory,
        counters=counters,
        seconds=seconds["seconds"] - seconds["seconds_load"],
    )
    return Report(
        metrics=(*read_metrics(results), *costs),
        results={name: value for name, value in results.items() if name != "samples"},
        model={**_identity(models, lm), **execution},
        providers=tuple({"name": item} if isinstance(item, str) else item for item in providers),
        versions=versions(),
        hardware=describe_hardware(),
        engine={**counters, **seconds},
        config=config.model_dump(mode="json", exclude_unset=True),
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def _with_comparison(report: Report, comparison: Comparison) -> Report:
    return replace(report, metrics=(*report.metrics, *comparison_metrics(comparison)), comparison=comparison)


def _identity(models: Models, lm: LM | None) -> dict[str, Any]:
    """Path and kind as resolved, and the digest of the content; a model of lm-eval's own has none."""
    kind = models.own.kind if lm is None else getattr(lm, "kind", "hf")
    identity = {"path": models.config.model.path, "kind": kind}
    digest = getattr(lm, "content_hash", None)
    return identity if digest is None else {**identity, "content_hash": digest}
