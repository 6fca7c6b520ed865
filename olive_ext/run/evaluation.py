"""`evaluate`: tasks are checked, the model is opened, lm-eval runs, the report is made and written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.backends.task_folders import task_folders
from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError, RunError, UnwrittenError
from olive_ext.report import Report, check_writable, write
from olive_ext.report.metrics import NON_FINITE, comparison_metrics, read_metrics
from olive_ext.report.sampled import sampled_metrics
from olive_ext.run.costs import asked_costs, asked_tasks, cost_metrics
from olive_ext.run.machine import PeakMemory, describe_hardware
from olive_ext.run.mlflow_log import logged_run
from olive_ext.run.models import Models
from olive_ext.run.reference.comparison_run import Comparer, comparer_of
from olive_ext.run.sample_logs import sample_fields, write_samples

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks, Seeds
    from olive_ext.records.journal import Journal


def evaluate(config: EvaluationConfig, *, lm: LM | None = None, progress: bool = False) -> Report:
    """Runs `config` and returns what it found; writes report and sample logs where `config` names folders.

    `lm` stands in for the model that `config` names, and stays open. `progress` shows bars on a terminal, else a line a
    minute on stderr. Every failure but an interruption is an `OliveExtError`; what does not exist (model, provider,
    folder, task) is noticed before the model is opened. Answers are journaled as they come; everything else is written
    when all is done.
    """
    log_folder, models = _log_folder(config), Models(config, progress)
    if lm is None:
        _refuse_missing(config, models)
    with logged_run(Path(config.model.path).name, config.model_dump(mode="json", exclude_unset=True)) as run:
        report, write_logs = _evaluate(models, lm, log_folder)
        try:
            write_logs()
            if config.output_dir is not None:
                write(report, config.output_dir)
        except RunError as error:
            raise UnwrittenError(str(error), report) from error
        run.log(report, config.output_dir, None if log_folder is None else str(log_folder))
    return report


def _evaluate(models: Models, lm: LM | None, log_folder: Path | None) -> tuple[Report, Callable[[], object]]:
    """The report, and what writes the sample logs."""
    config = models.config
    from olive_ext.backends.lm_eval.generation_settings import check_numbers
    from olive_ext.backends.task_checks import refuse_shots
    from olive_ext.backends.task_loading import Seeds, load_tasks

    names = asked_tasks(config)
    seeds = Seeds.of(config.seed)
    tasks = load_tasks(names, config.include_path, seeds) if names else None
    if tasks is not None:
        refuse_shots(tasks.tasks, config.num_fewshot)
        check_numbers(config.gen_kwargs)
    comparer = None if tasks is None else comparer_of(models, lm, tasks, seeds)
    if comparer is not None:
        comparer.prepare()
    with PeakMemory() as memory:
        begin = time.monotonic()
        opened = None
        if lm is None and tasks is not None:
            opened = models.candidate() if comparer is None else comparer.open()
        model = lm or opened
        journal = models.keep_answers(model) if model is not None else None
        try:
            loaded = time.monotonic()
            results = _run(models, model, tasks, seeds, journal, comparer)
            seconds = {"seconds": time.monotonic() - begin, "seconds_load": loaded - begin}
            report = _report(models, model, results, seconds, memory.bytes)
            if comparer is not None and model is not None:
                comparison = comparer.finish(model, results)
                own = [metric for metric in report.metrics if metric.task != NON_FINITE]
                metrics = (*sampled_metrics(own, comparison, results), *comparison_metrics(comparison))
                report = replace(report, metrics=metrics, comparison=comparison)
        finally:
            if lm is not None and hasattr(lm, "session"):
                lm.session.keep_answers(None)
            if opened is not None and hasattr(opened, "close"):
                opened.close()
    if log_folder is None or tasks is None:
        return report, lambda: None
    fields = sample_fields(tasks.tasks) if comparer is None else comparer.fields()
    samples = results.get("samples", {})
    return report, lambda: write_samples(samples, config.sample_log_num, log_folder, fields)


def _refuse_missing(config: EvaluationConfig, models: Models) -> None:
    """Refuses paths that lead nowhere or cannot be written, and providers that are not there, before lm-eval is
    imported for seconds."""
    task_folders(config.include_path)
    written = {"output_dir": config.output_dir, "sample_log_dir": config.sample_log_dir}
    written["use_cache"] = None if config.use_cache is None else str(Path(config.use_cache).parent)
    for setting, folder in written.items():
        if folder is not None:
            check_writable(folder, setting)
    for model in (models.own, models.other) if config.reference is not None else (models.own,):
        if model.kind == "onnx":
            _ = model.providers


def _log_folder(config: EvaluationConfig) -> Path | None:
    if not config.sample_log_num:
        return None
    folder = config.sample_log_dir or config.output_dir
    if folder is None:
        raise ConfigError(f"'sample_log_num' = {config.sample_log_num} needs 'sample_log_dir' or 'output_dir'")
    return Path(folder)


def _run(
    models: Models,
    lm: LM | None,
    tasks: LoadedTasks | None,
    seeds: Seeds,
    journal: Journal | None,
    comparer: Comparer | None,
) -> dict[str, Any]:
    from olive_ext.backends.lm_eval_run import run_tasks

    if lm is None or tasks is None:
        return {"results": {}}
    if comparer is not None and comparer.is_sampled:
        return comparer.run_sampled(lm, journal)
    config, has_reference = models.config, models.config.reference is not None
    return run_tasks(
        lm, tasks, config, seeds=seeds, journal=journal, progress=models.progress, log_samples=has_reference
    )


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
        size=lambda: models.size(lm),
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


def _identity(models: Models, lm: LM | None) -> dict[str, Any]:
    """Path and kind as resolved, and the digest of the content; a model of lm-eval's own has none."""
    kind = models.own.kind if lm is None else getattr(lm, "kind", "hf")
    identity = {"path": models.config.model.path, "kind": kind}
    digest = getattr(lm, "content_hash", None)
    return identity if digest is None else {**identity, "content_hash": digest}
