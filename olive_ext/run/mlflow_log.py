"""Reports on an MLflow server: the only door to mlflow. Its failures never stop an evaluation; knows no model."""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from olive_ext.report import Report, has_several_filters, model_name, write
from olive_ext.report.numbers import flat

VARIABLE = "MLFLOW_TRACKING_URI"
_INSTALL = "pip install 'olive-ext[mlflow]'"

_MAX_NAME = 250
_MAX_VALUE = 500
_MAX_PARAMS, _MAX_METRICS = 100, 1000
"""MLflow's own limits: characters of a name, of a value (servers before 2.10), and items in one request."""

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Under its own defaults MLflow retries an unreachable server for minutes, and prints to stdout."""

logger = logging.getLogger(__name__)


def log_report(report: Report, folder: str | None = None, *, mlflow: Any = None) -> bool:
    """Logs params, metrics and the report's files as one run where MLFLOW_TRACKING_URI is set; whether it did.

    `folder` is where the report was written, if it was. MLflow's own variables name experiment and credentials; inside
    an active run the new one is nested. Every failure is a warning. `mlflow` stands in for the module.
    """
    if not os.environ.get(VARIABLE):
        return False
    try:
        with _defaults():
            _log(mlflow or importlib.import_module("mlflow"), report, folder)
    except ImportError as error:
        logger.warning("%s is set, but nothing is logged: %s; get it with: %s", VARIABLE, error, _INSTALL)
        return False
    except Exception as error:  # noqa: BLE001 - a server's trouble is not the evaluation's
        logger.warning("the report is not in MLflow: %s: %s", type(error).__name__, " ".join(str(error).split())[:300])
        return False
    return True


def _log(mlflow: Any, report: Report, folder: str | None) -> None:
    with mlflow.start_run(run_name=model_name(report), nested=mlflow.active_run() is not None):
        for params in _chunks(params_of(report), _MAX_PARAMS):
            mlflow.log_params(params)
        for metrics in _chunks(metrics_of(report), _MAX_METRICS):
            mlflow.log_metrics(metrics)
        with tempfile.TemporaryDirectory() as scratch:
            if folder is None:
                write(report, scratch)
            for suffix in ("json", "md", "html"):
                file = Path(scratch if folder is None else folder) / f"report.{suffix}"
                if file.is_file():
                    mlflow.log_artifact(str(file))


def metrics_of(report: Report) -> dict[str, float]:
    """`<task>/<metric>`, with the filter where there are several, error bars as `..._stderr`; finite numbers only."""
    found: dict[str, float] = {}
    for metric in report.metrics:
        parts = [metric.task, metric.metric]
        if has_several_filters(report, metric.task):
            parts.append(metric.filter)
        found["\0".join(parts)] = metric.value
        if metric.stderr is not None:
            found["\0".join([*parts[:-1], f"{parts[-1]}_stderr"])] = metric.stderr
    return {name: value for name, value in _named(found).items() if math.isfinite(value)}


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
    named = _named(flat(known)).items()
    return {name: text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…" for name, text in named}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under names that MLflow accepts, each different: one that is cut or taken ends in a digest of itself."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        legal = legal_name(name)
        if len(legal) > _MAX_NAME or legal in found:
            legal = f"{legal[: _MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        found[legal] = value
    return found


def legal_name(name: str) -> str:
    """Replaces everything but letters, digits, `_`, `-`, `.` and spaces by `_`, and NUL, which joins parts, by `/`."""
    parts = [re.sub(r"[^A-Za-z0-9_\-. ]", "_", part) for part in name.split("\0")]
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _chunks(values: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    items = iter(values.items())
    while chunk := dict(islice(items, size)):
        yield chunk


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
