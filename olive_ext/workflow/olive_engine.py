"""What this package adds to Olive's `Engine`: early refusals, a sound evaluation cache, no swallowed failures, bounds.

Only evaluations by `OrtLMEvaluator` and passes `OrtLMEvaluation` are touched. Knows no recipe file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olive_ext.config import WorkflowSettings
from olive_ext.config.base import word
from olive_ext.errors import ModelError, OliveExtError
from olive_ext.run.gate import broken_bounds
from olive_ext.workflow.after_passes import publish, requirement_error, run_pass
from olive_ext.workflow.fingerprint import deciding, digest, environment, missed_files
from olive_ext.workflow.log import logger
from olive_ext.workflow.measure import report_folder, surfaced
from olive_ext.workflow.metric_results import as_keyed, to_metrics
from olive_ext.workflow.preflight import is_ours, our_evaluators, our_passes, refuse
from olive_ext.workflow.running import Run, running
from olive_ext.workflow.search import refuse_no_output, resolve_goals
from olive_ext.workflow.wrapping import wrap_once

_PARAMETERS = {
    "run": {"input_model_config"},
    "initialize": set(),
    "_evaluate_model": {"model_config", "evaluator_config"},
    "_load_evaluation": {"model_id"},
    "_cache_evaluation": {"model_id", "signal"},
    "_run_pass": {"pass_name", "input_model_id"},
    "resolve_goals": {"metrics"},
}


@dataclass(frozen=True)
class _Evaluation:
    """The evaluation in progress, while it is ours."""

    suffix: str
    """Added to Olive's cache key."""

    report: Path | None
    """report.json that the evaluation writes."""


@dataclass
class Outcome:
    """How a run of the engine ended: which of our evaluations failed, and whether it gave up without saying so."""

    failures: list[OliveExtError] = field(default_factory=list)
    gave_up: bool = False


_evaluation: ContextVar[_Evaluation | None] = ContextVar("evaluation", default=None)
_watchers: list[list[Outcome]] = []


@contextmanager
def watched_runs() -> Iterator[list[Outcome]]:
    """The outcomes of all engine runs inside, in any thread."""
    outcomes: list[Outcome] = []
    _watchers.append(outcomes)
    try:
        yield outcomes
    finally:
        _watchers.remove(outcomes)


def mend(engine: type) -> None:
    """Wraps seven methods of Olive's engine, once; says so, or warns where this Olive has others."""
    missing = [name for name, wanted in _PARAMETERS.items() if not _takes(engine, name, wanted)]
    if missing:
        logger.warning(
            "this version of Olive has another engine (%s): evaluations in its cache may be stale after a change of "
            "tasks or versions, set 'clean_evaluation_cache'",
            ", ".join(missing),
        )
        return
    wrap_once(engine, "run", _run)
    wrap_once(engine, "initialize", _initialize)
    wrap_once(engine, "resolve_goals", resolve_goals)
    wrap_once(engine, "_run_pass", run_pass)
    wrap_once(engine, "_load_evaluation", _load_evaluation)
    wrap_once(engine, "_cache_evaluation", _cache_evaluation)
    if wrap_once(engine, "_evaluate_model", _evaluate_model):
        logger.info("evaluations by OrtLMEvaluator are cached by settings, task files, versions and model content")


def _takes(engine: type, name: str, parameters: set[str]) -> bool:
    method = getattr(engine, name, None)
    return method is not None and parameters <= set(inspect.signature(method).parameters)


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        output_dir = Path(given.get("output_dir") or ".").resolve()
        begun = Run(given["input_model_config"], output_dir, is_search=bool(self.search_strategy))
        token = running.set(begun)
        try:
            refuse(self, begun.input_model)
            output = original(self, *args, **kwargs)
            if any(our_passes(self)):
                publish(self, begun, output)
        finally:
            running.reset(token)
        outcome = Outcome(begun.failures, _gave_up(self, output, given.get("evaluate_input_model", True)))
        for outcomes in _watchers:
            outcomes.append(outcome)
        if outcome.gave_up and outcome.failures:
            raise outcome.failures[0]  # a search notes every failure in the log and ends well
        if begun.is_search:
            refuse_no_output(self, output)
        if begun.broken is not None:
            raise begun.broken
        return output

    return run


def _initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for _, evaluator in our_evaluators(self):
            for metric in evaluator.metrics:
                metric.name = word(metric.name)  # a task's name, which initialize made a path of

    return initialize


def _gave_up(engine: Any, output: Any, evaluate_input_model: bool) -> bool:
    """Olive logs what is no user error in its eyes, and goes on without the model or the numbers."""
    if engine.input_passes_configs:
        return not output.has_output_model()
    return bool(engine.evaluator_config and evaluate_input_model and output.get_input_model_metrics() is None)


def _evaluate_model(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def _evaluate_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        model_config, evaluator_config = given["model_config"], given["evaluator_config"]
        if not is_ours(evaluator_config):
            return original(self, *args, **kwargs)
        try:
            with surfaced("the evaluation stopped"):
                signal = _evaluate_ours(model_config, evaluator_config, lambda: original(self, *args, **kwargs))
            _judge(self, model_config, evaluator_config, signal)
        except OliveExtError as error:
            run = running.get()
            if run is not None:
                run.failures.append(error)
            raise
        return signal

    return _evaluate_model


def _judge(engine: Any, model_config: Any, evaluator_config: Any, signal: Any) -> None:
    """Holds an output model against the evaluator's bounds, and the input model where there is no other.

    In a search the candidate is out at once; else Olive first saves the model and its metrics.
    """
    run, bounds = running.get(), WorkflowSettings.parse(evaluator_config.type_args).require
    is_input = run is not None and engine.input_passes_configs and model_config is run.input_model
    lines = broken_bounds(as_keyed(bounds), to_metrics(signal)) if bounds and not is_input else []
    if not lines:
        return
    error = requirement_error(f"evaluators.{evaluator_config.name or 'evaluator'}", lines)
    if run is None or run.is_search:
        raise error
    run.broken = error


def _evaluate_ours(model_config: Any, evaluator_config: Any, evaluate: Callable[[], Any]) -> Any:
    if model_config.type.lower() == "compositemodel":
        raise ModelError("Olive gives composite models to no evaluator: measure this one with the pass OrtLMEvaluation")
    settings = WorkflowSettings.parse(evaluator_config.type_args)
    written = evaluator_config.to_json()
    suffix = digest(
        [
            {
                **written,
                "type_args": deciding(written.get("type_args") or {}, {"output_dir"}),
            },  # its report is looked for
            environment(settings),
            missed_files(model_config.type, model_config.config, settings),
        ]
    )
    path, report = model_config.config.get("model_path"), None
    if settings.output_dir is not None and isinstance(path, str):
        report = report_folder(settings.output_dir, path) / "report.json"
    token = _evaluation.set(_Evaluation(f"-{suffix}", report))
    try:
        return evaluate()
    finally:
        _evaluation.reset(token)


def _load_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
    def _load_evaluation(self: Any, model_id: str) -> Any:
        evaluation = _evaluation.get()
        if evaluation is None:
            return original(self, model_id)
        if evaluation.report is not None and not evaluation.report.exists():
            return None  # the numbers may be known, but the report was asked for
        signal = original(self, f"{model_id}{evaluation.suffix}")
        if signal is not None:
            logger.info(
                "evaluation of model %s taken from Olive's cache: nothing that decides it has changed", model_id
            )
        return signal

    return _load_evaluation


def _cache_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
    def _cache_evaluation(self: Any, model_id: str, signal: Any) -> Any:
        evaluation = _evaluation.get()
        return original(self, f"{model_id}{evaluation.suffix}" if evaluation else model_id, signal)

    return _cache_evaluation
