"""The evaluator type `OrtLMEvaluator`; `measure`, which makes a report of one of Olive's model handlers, and which the
pass calls, too; and the hooks of Olive's evaluations: ours are made anew in each run, and models are held to the
evaluator's bounds.

Olive's cache of evaluations goes by the model's id: it knows neither the settings nor the data, whatever names these.
What an earlier run has computed is in the journal of answers, which goes by each request. Knows no recipe.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from olive.evaluator.olive_evaluator import OliveEvaluator

from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, Bound, EvaluationConfig, EvaluationSettings, evaluator_settings
from olive_ext.errors import ModelError, RequirementError, RunError, named_failures
from olive_ext.model.files.package_config import GENAI_CONFIG, read_json
from olive_ext.report import Report, write
from olive_ext.run import check_complete
from olive_ext.run import evaluate as run_evaluate
from olive_ext.run.bounds import check_declared, kept_bounds, with_measurements
from olive_ext.run.costs import is_timed, requested_tasks
from olive_ext.run.reference.comparison_run import is_own_reference
from olive_ext.workflow.current_run import recorded_failures, requirement_error, running
from olive_ext.workflow.handlers import as_loaded, config_of, is_changed, label, name_of
from olive_ext.workflow.metric_results import broken_in, declared_pairs, to_metric_result
from olive_ext.workflow.preflight import is_ours


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


_is_evaluating: ContextVar[bool] = ContextVar("is_evaluating", default=False)
"""Whether the evaluation in progress is one of ours."""


def evaluate_model(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `Engine._evaluate_model`: our evaluations pass Olive's cache by, and are checked against bounds."""
    model, evaluator = arguments["model_config"], arguments["evaluator_config"]
    if not is_ours(evaluator):
        return original()
    if (run := running.get()) is not None:
        run.model_id = arguments["model_id"]
    known = 0 if run is None else len(run.reports)
    settings = evaluator_settings()[evaluator.type].parse(evaluator.type_args)
    with recorded_failures():
        with surfaced("the evaluation stopped"), nullcontext() if run is None else run.unchanged(settings.reference):
            signal = _evaluated(model, evaluator, original)
        is_input = run is not None and engine.input_passes_configs and model is run.input_model
        try:
            _judge(evaluator, settings.bounds, signal if not is_input else None, known)
        except RequirementError:
            engine.footprint.nodes[arguments["model_id"]].metrics = None  # a search chooses among all that have metrics
            raise
    return signal


def _evaluated(model: Any, evaluator: Any, original: Callable[..., Any]) -> Any:
    runs_tasks = evaluator.type == EVALUATOR_TYPE
    if model.type.lower() == "compositemodel":
        other = f"measure this one with the pass {PASS_TYPE}"
        how = other if runs_tasks else "name the folder that it is saved in as ONNXModel"
        raise ModelError(f"Olive cannot run an evaluator on a composite model: {how}")
    token = _is_evaluating.set(True)
    try:
        return original() if runs_tasks else original(model_config=_with_file_name(model))
    finally:
        _is_evaluating.reset(token)


def pass_by(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `Engine._load_evaluation` and `_cache_evaluation`: of our evaluations nothing is known or kept."""
    return None if _is_evaluating.get() else original()


def _with_file_name(model: Any) -> Any:
    """Olive's configuration of a model, with the decoder's file that genai_config.json names where a folder has several
    graphs: Olive 0.13 refuses it without."""
    path, name = model.config.get("model_path"), model.config.get("onnx_file_name")
    if (
        model.type.lower() != "onnxmodel"
        or name
        or not isinstance(path, str)
        or len(list(Path(path).glob("*.onnx"))) == 1
    ):
        return model
    file = Path(path, GENAI_CONFIG)
    decoder = read_json(file).get("model", {}).get("decoder", {}).get("filename") if file.is_file() else None
    if not isinstance(decoder, str) or not Path(path, decoder).is_file():
        return model
    return model.model_copy(update={"config": {**model.config, "onnx_file_name": decoder}})


def _judge(evaluator: Any, bounds: Sequence[Bound], signal: Any, known: int) -> None:
    """Checks a model against the evaluator's bounds; None in place of its `signal` for an input model, which has to
    keep none. Its report, which comes after `known` others of the run, names the broken and the kept bounds.

    In a search the candidate is rejected at once; else Olive first saves the model and its metrics.
    """
    run = running.get()
    broken = broken_in(signal, bounds) if bounds and signal is not None else []
    report: Report | None = None
    if run is not None and len(run.reports) > known:
        old = run.reports[-1]
        kept = broken_in(signal, bounds, kept_bounds) if bounds and signal is not None else []
        comparison = old.comparison and replace(run.as_saved(old.comparison), kept_bounds=tuple(kept))
        run.reports[-1] = report = replace(old, broken=tuple(broken), comparison=comparison)
        if report != old and (folder := old.config.get("output_dir")):
            write(report, folder)
        found = report.verdict if run.is_search and signal is not None else None
        if found is not None and comparison is not None and not broken:
            # A claim and damage to files are no bounds of the numbers, by which a search chooses.
            is_broken = comparison.certainty is not None and found.status == "loss"
            if is_broken or comparison.damaged:
                broken = [replace(found.reasons[0], words=found.headline)]
    if not broken:
        return
    error = requirement_error(f"evaluators.{evaluator.name or 'evaluator'}", broken, report)
    if run is None or run.is_search:
        raise error
    run.broken = error
