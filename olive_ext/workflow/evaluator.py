"""The evaluator type `OrtLMEvaluator`, and `measure`, which makes a report of one of Olive's model handlers. The pass
calls `measure`, too. Knows no recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from olive.evaluator.olive_evaluator import OliveEvaluator

from olive_ext.config import EVALUATOR_TYPE, EvaluationConfig, EvaluationSettings
from olive_ext.errors import RequirementError, RunError, named_failures
from olive_ext.report import Report
from olive_ext.run import check_complete
from olive_ext.run import evaluate as run_evaluate
from olive_ext.run.bounds import check_declared, with_measurements
from olive_ext.run.costs import is_timed, requested_tasks
from olive_ext.run.reference.comparison_run import is_own_reference
from olive_ext.workflow.current_run import running
from olive_ext.workflow.handlers import as_loaded, config_of, is_changed, label, name_of
from olive_ext.workflow.metric_results import declared_pairs, to_metric_result


def measure(
    model: Any,
    settings: EvaluationSettings,
    *,
    device: Any = None,
    execution_providers: Any = None,
    evaluate: Callable[..., Report] = run_evaluate,
) -> Report:
    """Evaluates an Olive model handler.

    `device` and `execution_providers` (a name, a list of names, or None) are Olive's accelerator; the settings have
    precedence over them. Reports and sample logs go to a sub-folder per model of the folders in the settings. Every
    failure is an `OliveExtError`, which is a `ValueError`: Olive logs most other exceptions and ends with status 0.
    """
    with surfaced("the evaluation stopped"):
        is_input = settings.reference is not None and settings.reference.is_input_model
        config = config_of(model, settings, device, execution_providers)
        path = str(model.get_resource("model_path") or config.model.path)
        config = _with_own_folders(config, path)
        if (run := running.get()) is not None and config.journal is None and not is_timed(config):
            config = config.model_copy(update={"use_cache": run.answers})
        names = {"model": name_of(path), "reference": "the input model" if is_input else None}
        with ExitStack() as stack:
            if config.model.kind == "hf" and requested_tasks(config) and is_changed(model):
                which = config.model.model_copy(update={"path": stack.enter_context(as_loaded(model))})
                config = config.model_copy(update={"model": which})
            if is_own_reference(config, config.model.kind):  # an input model, which has to keep no bound
                config = config.model_copy(update={"fail_on_loss": None})
            try:
                report = evaluate(config.as_job(), progress=True, names=names)
            except RequirementError as error:  # the workflow decides which models are held to bounds
                report = replace(error.report, broken=())
        if run is not None:
            run.add(report)
        check_complete(report, config.on_error)
        return report


def _with_own_folders(config: EvaluationConfig, path: str) -> EvaluationConfig:
    """`config` with `output_dir` and `sample_log_dir` moved to this model's own sub-folder.

    One evaluator measures the input model and then each output model; in one folder only the last report would stay.
    """
    folders = {
        name: str(Path(folder) / label(path))
        for name in ("output_dir", "sample_log_dir")
        if (folder := getattr(config, name)) is not None
    }
    return config.model_copy(update=folders) if folders else config


surfaced = partial(named_failures, kind=RunError)
"""Turns every exception but `OliveExtError` into a `RunError` of one line, also that of a PythonEnvironment's process.
"""


class OrtLMEvaluator(OliveEvaluator):  # type: ignore[misc]
    """Scores a model with lm-eval tasks. Its keys are those of `EvaluationSettings`.

    Olive makes a new one for each evaluation, from the same keys.
    """

    measure: ClassVar[Callable[..., Report]] = staticmethod(measure)
    """The function from a handler to a report, which a subclass may replace."""

    def __init__(self, **settings: Any) -> None:
        """Raises `ConfigError` for unknown keys and wrong values."""
        super().__init__()
        # Olive hands the recipe's own lists and mappings over, and lm-eval writes into inline task definitions.
        self.settings = EvaluationSettings.parse(copy.deepcopy(settings))

    def evaluate(self, model: Any, metrics: Any = None, device: Any = None, execution_providers: Any = None) -> Any:
        """Olive's `MetricResult` for a model handler.

        `metrics` are those that the recipe declares, `execution_providers` a name, a list of names or None. Raises an
        `OliveExtError` for every failure.
        """
        declared = list(metrics or ())
        check_declared(pairs := declared_pairs(declared), EVALUATOR_TYPE)
        settings = with_measurements(self.settings, pairs)
        report = type(self).measure(model, settings, device=device, execution_providers=execution_providers)
        return to_metric_result(report, declared, self.settings.bounds)
