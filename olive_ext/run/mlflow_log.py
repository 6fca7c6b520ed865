"""Evaluations on an MLflow server: the only door to mlflow. Its failures never stop an evaluation; knows no model.

A run is begun before the evaluation, so that one that is killed and started again goes on in the same run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olive_ext.errors import printable
from olive_ext.report import Report, model_name, write
from olive_ext.run.mlflow_names import KEY, STEP, chunks, metrics_of, params_of, tags_of

VARIABLE = "MLFLOW_TRACKING_URI"
_INSTALL = "pip install 'olive-ext[mlflow]'"
_MAX_PARAMS, _MAX_METRICS = 100, 1000
"""MLflow's limits of one request."""

_OUTPUTS = ("output_dir", "sample_log_dir", "records_dir", "use_cache")

_NOT_ENDED = "attributes.status != 'FINISHED' and attributes.status != 'FAILED'"
"""Runs of killed processes are RUNNING for ever, those of interrupted ones KILLED."""

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Under its own defaults MLflow retries an unreachable server for minutes, and prints to stdout."""

logger = logging.getLogger(__name__)


@dataclass
class LoggedRun:
    """A run of MLflow, or none where nothing is to be logged or the server cannot be reached."""

    mlflow: Any = None
    run_id: str | None = None
    parent: LoggedRun | None = None
    step: int = 0
    """Which of its parent's runs it is."""

    files: list[Path] = field(default_factory=list)
    """Further artifacts of the run, logged when it ends."""

    children: set[str] = field(default_factory=set)
    """Digests of the keys of those begun inside it."""

    def log(self, report: Report, folder: str | None = None, samples: str | None = None) -> None:
        """Logs the report: params, metrics, tags, its files and sample logs; its metrics on the parent, too, as a step.

        `folder` is where the report was written, if it was, `samples` where sample logs were.
        """
        if self.run_id is None:
            return
        with _warned("the report is not in MLflow"), _defaults():
            mlflow, known = self.mlflow, self.mlflow.get_run(self.run_id).data.params
            mlflow.set_tags({"mlflow.runName": printable(model_name(report)), **tags_of(report)})
            new = {name: value for name, value in params_of(report).items() if name not in known}  # they never change
            for params in chunks(new, _MAX_PARAMS):
                mlflow.log_params(params)
            metrics = metrics_of(report)
            for part in chunks(metrics, _MAX_METRICS):
                mlflow.log_metrics(part)
                if self.parent is not None and self.parent.run_id is not None:
                    mlflow.log_metrics(part, step=self.step, run_id=self.parent.run_id)
            with tempfile.TemporaryDirectory() as scratch:
                if folder is None:
                    write(report, scratch)
                place = Path(folder or scratch)
                files = [place / f"report.{suffix}" for suffix in ("json", "md", "html")]
                logs = Path(samples).glob("samples_*.jsonl") if samples is not None else ()
                for file in (*files, *sorted(logs)):
                    if file.is_file():
                        mlflow.log_artifact(str(file))


_workflow: ContextVar[LoggedRun | None] = ContextVar("workflow", default=None)


@contextmanager
def logged_run(
    name: str, key: Mapping[str, Any], *, is_parent: bool = False, mlflow: Any = None
) -> Iterator[LoggedRun]:
    """A run for the block where MLFLOW_TRACKING_URI is set; one inside a parent's block is its child.

    A run of the same `key` that was killed or interrupted, and under the same parent any, is gone on with; so is the
    run that MLFLOW_RUN_ID names, as a job on Azure ML has it. MLflow's own variables name experiment and credentials.
    `mlflow` stands in for the module.
    """
    run = LoggedRun(parent=_workflow.get())
    if os.environ.get(VARIABLE):
        with _warned("the evaluation is not in MLflow"), _defaults():
            run.mlflow = mlflow or importlib.import_module("mlflow")
            run.run_id = _begin(run, name, key)
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
        if _digest(report.config) not in parent.children:
            with logged_run(model_name(report), report.config, mlflow=parent.mlflow) as run:
                run.log(report, samples=report.config.get("sample_log_dir"))


def _begin(run: LoggedRun, name: str, key: Mapping[str, Any]) -> str:
    """Starts the run, or the one that it goes on with; returns its id."""
    mlflow, active = run.mlflow, run.mlflow.active_run()
    if active is None and os.environ.get("MLFLOW_RUN_ID"):
        return str(mlflow.start_run().info.run_id)
    digest, is_child = _digest(key), active is not None
    if run.parent is not None:
        run.parent.children.add(digest)
    siblings = f"tags.`mlflow.parentRunId` = '{active.info.run_id}'" if is_child else _NOT_ENDED
    known = mlflow.search_runs(filter_string=siblings, max_results=1000, output_format="list")
    found = next((one for one in known if one.data.tags.get(KEY) == digest), None)
    if found is not None:
        run.step = int(found.data.tags.get(STEP, 0))
        begun = mlflow.start_run(run_id=found.info.run_id, nested=is_child)
    else:
        run.step = len(known) if is_child else 0
        begun = mlflow.start_run(run_name=printable(name), nested=is_child, tags={KEY: digest, STEP: str(run.step)})
    return str(begun.info.run_id)


def _digest(key: Mapping[str, Any]) -> str:
    facts = {"key": _without_outputs(key), "host": socket.gethostname(), "folder": str(Path.cwd())}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _without_outputs(value: Any) -> Any:
    """Settings without the folders that are written to: Olive makes these absolute once they exist, so that a second
    run would be unlike the first."""
    if isinstance(value, Mapping):
        return {name: _without_outputs(item) for name, item in value.items() if name not in _OUTPUTS}
    return [_without_outputs(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def _warned(what: str) -> Iterator[None]:
    """Turns every failure of the block into a warning: a server's trouble is not the evaluation's."""
    try:
        yield
    except ImportError as error:
        logger.warning("%s: %s is set, but %s; get it with: %s", what, VARIABLE, error, _INSTALL)
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
