"""The one road from a model that Olive hands over to a report. Evaluator and pass both take it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from olive_ext.config import EvaluationConfig, EvaluationSettings
from olive_ext.errors import OliveExtError, RunError, one_line
from olive_ext.report import Report
from olive_ext.run import evaluate as run_evaluate
from olive_ext.run.costs import asked_tasks
from olive_ext.workflow.handlers import hf_config, label, onnx_config, open_baseline, resolve
from olive_ext.workflow.input_model import with_reference

Evaluate = Callable[..., Report]


def measure(
    model: Any,
    settings: EvaluationSettings,
    *,
    device: Any = None,
    execution_providers: Any = None,
    evaluate: Evaluate = run_evaluate,
) -> Report:
    """Evaluates an Olive model handler.

    `device` and `execution_providers` (a name, a list of names, or None) are Olive's accelerator; what the settings say
    goes first. Reports and sample logs go to a sub-folder per model of the folders that the settings name. Every
    failure is an `OliveExtError`: Olive swallows what is no `ValueError`, and ends with status 0.
    """
    with surfaced("the evaluation stopped"):
        settings = with_reference(settings)
        kind, handler = resolve(model)
        is_onnx = kind == "onnx"
        config = onnx_config(handler, settings, execution_providers) if is_onnx else hf_config(handler, settings)
        config = with_own_folders(config, str(model.get_resource("model_path") or config.model.path))
        lm = None
        if not is_onnx and asked_tasks(config):
            lm = open_baseline(handler, config, device)
        return evaluate(config, lm=lm, progress=sys.stderr.isatty())


def with_own_folders(config: EvaluationConfig, path: str) -> EvaluationConfig:
    """`config` with `output_dir` and `sample_log_dir` moved to this model's own sub-folder.

    One evaluator measures the input model and then each output model; in one folder the last would stay alone.
    """
    folders = {
        name: str(report_folder(folder, path))
        for name in ("output_dir", "sample_log_dir")
        if (folder := getattr(config, name)) is not None
    }
    return config.model_copy(update=folders) if folders else config


def report_folder(output_dir: str, path: str) -> Path:
    """Where the report of the model at `path` goes; see `handlers.label`."""
    return Path(output_dir) / label(path)


@contextmanager
def surfaced(doing: str) -> Iterator[None]:
    """Every exception but our own becomes a `RunError`. An interruption is no such exception and passes."""
    try:
        yield
    except OliveExtError:
        raise
    except Exception as error:
        raise RunError(f"{doing}: {_told(error)}") from error


def _told(error: Exception) -> str:
    """One line; of a process that Olive started (a PythonEnvironment) the last one that it wrote."""
    written = getattr(error, "stderr", None)
    lines = written.strip().splitlines() if isinstance(written, str) else []
    return lines[-1] if lines else one_line(error)
