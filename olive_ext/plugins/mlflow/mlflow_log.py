"""Evaluations on an MLflow server: the only module that uses mlflow. Its failures never stop an evaluation; knows no
model."""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olive_ext.errors import printable
from olive_ext.report import Report, write
from olive_ext.report.numbers import flat
from olive_ext.report.page import model_name
from olive_ext.report.report import has_several_filters

VARIABLE = "MLFLOW_TRACKING_URI"
_MAX_NAME = 250
_MAX_VALUE = 500
"""MLflow's own limits: characters of a name, and of a value (servers before 2.10)."""

_TAGGED = ("olive-ext", "olive-ai", "onnxruntime", "onnxruntime-gpu", "onnxruntime-genai")

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Under its own defaults MLflow retries an unreachable server for minutes, and prints to stdout."""

logger = logging.getLogger(__name__)


@dataclass
class LoggedRun:
    """A run of MLflow, or none where nothing is logged or the server cannot be reached."""

    mlflow: Any = None
    run_id: str | None = None
    parent: LoggedRun | None = None
    step: int = 0
    """Which of its parent's runs it is."""

    files: list[Path] = field(default_factory=list)
    """Further artifacts of the run, logged when it ends."""

    num_children: int = 0
    """The number of runs begun inside it."""

    logged: set[tuple[str, str]] = field(default_factory=set)
    """When reports of those were made, and paths of their models."""

    def log(self, report: Report, folder: str | None = None, samples: str | None = None) -> None:
        """Logs the report: params, metrics, tags, its files and sample logs; its metrics on the parent, too, as a step.

        `folder` is where the report was written, if it was, `samples` where sample logs were.
        """
        if self.run_id is None:
            return
        with _warned("the report is not in MLflow"), _defaults():
            mlflow, metrics = self.mlflow, metrics_of(report)
            mlflow.set_tags({"mlflow.runName": printable(model_name(report)), **tags_of(report)})
            mlflow.log_params(params_of(report))  # its client makes requests of a size that servers take
            mlflow.log_metrics(metrics)
            if self.parent is not None and self.parent.run_id is not None:
                self.parent.logged.add(_identity(report))
                mlflow.log_metrics(metrics, step=self.step, run_id=self.parent.run_id)
            with tempfile.TemporaryDirectory() as scratch:
                if folder is None:
                    write(report, scratch)
                written_to = Path(folder or scratch)
                files = [written_to / f"report.{suffix}" for suffix in ("json", "md", "html")]
                logs = Path(samples).glob("samples_*.jsonl") if samples is not None else ()
                for file in (*files, *sorted(logs)):
                    if file.is_file():
                        mlflow.log_artifact(str(file))


_workflow: ContextVar[LoggedRun | None] = ContextVar("workflow", default=None)


@contextmanager
def logged_run(name: str, *, is_parent: bool = False, mlflow: Any = None) -> Iterator[LoggedRun]:
    """A run for the block where MLFLOW_TRACKING_URI is set; one inside a parent's block is its child.

    The run that MLFLOW_RUN_ID names, as a job on Azure ML has it, is gone on with. MLflow's own variables name
    experiment and credentials. `mlflow` stands in for the module.
    """
    run = LoggedRun(parent=_workflow.get())
    if os.environ.get(VARIABLE):
        with _warned("the evaluation is not in MLflow"), _defaults():
            run.mlflow = mlflow or importlib.import_module("mlflow")
            is_nested = run.mlflow.active_run() is not None
            run.run_id = run.mlflow.start_run(run_name=printable(name), nested=is_nested).info.run_id
            if run.parent is not None:
                run.step, run.parent.num_children = run.parent.num_children, run.parent.num_children + 1
    token = _workflow.set(run) if is_parent else None
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        if token is not None:
            _workflow.reset(token)
        if run.run_id is not None:
            with _warned("the run in MLflow is not ended"), _defaults():
                for file in filter(Path.is_file, run.files):
                    run.mlflow.log_artifact(str(file))
                run.mlflow.end_run(status)


def log_cached(read: Callable[[], Report]) -> None:
    """A run for an evaluation that the workflow took from a cache; none where this workflow has one for it already.
    `read` gives its report."""
    parent = _workflow.get()
    if parent is None or parent.run_id is None:
        return
    with _warned("an earlier evaluation is not in MLflow"):
        report = read()
        if _identity(report) not in parent.logged:
            with logged_run(model_name(report), mlflow=parent.mlflow) as run:
                run.log(report, samples=report.config.get("sample_log_dir"))


def _identity(report: Report) -> tuple[str, str]:
    return report.created, str(report.model.get("path"))


@contextmanager
def _warned(what: str) -> Iterator[None]:
    """Turns every failure within it into a warning: a server's trouble must not stop the evaluation."""
    try:
        yield
    except ImportError as error:
        install = "install the extra 'mlflow' ('.[mlflow]' in a clone)"
        logger.warning("%s: %s is set, but %s; %s", what, VARIABLE, error, install)
    except Exception as error:  # noqa: BLE001 - whatever a server, or a store on disk, throws
        logger.warning("%s: %s: %s", what, type(error).__name__, " ".join(str(error).split())[:300])


@contextmanager
def _defaults() -> Iterator[None]:
    """Sets those of MLflow's variables that the user has not set, until the block ends."""
    added = {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def tags_of(report: Report) -> dict[str, str]:
    """Tags to look runs up by: the digest of the model's content, versions, and the verdict where there is one."""
    tags = {f"olive_ext.version.{name}": report.versions[name] for name in _TAGGED if name in report.versions}
    if digest := report.model.get("content_hash"):
        tags["olive_ext.model_digest"] = str(digest)
    if (judged := report.verdict) is not None:
        tags |= {"olive_ext.verdict": judged.finding, "olive_ext.verdict_kind": judged.code}
        tags["olive_ext.verdict_status"] = judged.status
    return {name: printable(text)[:_MAX_VALUE] for name, text in tags.items()}


def metrics_of(report: Report) -> dict[str, float]:
    """`<task>/<metric>`, with the filter where there are several, error bars as `..._stderr`; finite numbers only."""
    values: dict[str, float] = {}
    for metric in report.metrics:
        parts = [metric.task, metric.metric]
        if has_several_filters(report, metric.task):
            parts.append(metric.filter)
        values["\0".join(parts)] = metric.value
        if metric.stderr is not None:
            values["\0".join([*parts[:-1], f"{parts[-1]}_stderr"])] = metric.stderr
    return {name: value for name, value in _named(values).items() if math.isfinite(value)}


def params_of(report: Report) -> dict[str, str]:
    """Configuration, model, providers, versions and hardware, as flat names and short texts."""
    facts = {
        "config": report.config,
        "model": report.model,
        "providers": [provider.get("name") for provider in report.providers],
        "versions": report.versions,
        "hardware": report.hardware,
    }
    known = {name: values for name, values in facts.items() if values}
    named = ((name, printable(text)) for name, text in _named(flat(known)).items())
    return {name: text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…" for name, text in named}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under names that MLflow accepts, each different: one that is cut or taken ends in a digest of itself."""
    legal_values: dict[str, Any] = {}
    for name, value in values.items():
        legal = legal_name(name)
        if len(legal) > _MAX_NAME or legal in legal_values:
            legal = f"{legal[: _MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        legal_values[legal] = value
    return legal_values


def legal_name(name: str) -> str:
    """Replaces everything but letters, digits, `_`, `-`, `.` and spaces by `_`, and NUL, which joins parts, by `/`."""
    parts = [re.sub(r"[^A-Za-z0-9_\-. ]", "_", part) for part in name.split("\0")]
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
