"""The hooks of Olive's evaluations: ours are made anew in each run, and models are held to the evaluator's bounds.

Olive's cache of evaluations goes by the model's id: it knows neither the settings nor the data, whatever names these.
What an earlier run has computed is in the journal of answers, which goes by each request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, Bound, evaluator_settings
from olive_ext.errors import ModelError, RequirementError
from olive_ext.model.files.package_config import GENAI_CONFIG, read_json
from olive_ext.report import Report, write
from olive_ext.run.bounds import kept_bounds
from olive_ext.workflow.current_run import recorded_failures, requirement_error, running
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.metric_results import broken_in
from olive_ext.workflow.preflight import is_ours

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
