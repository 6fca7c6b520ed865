"""The evaluator type `OrtLMEvaluator`; `measure`, which makes a report of one of Olive's model handlers, and which the
pass calls, too; the conversion of a report to Olive's `MetricResult`, with the metrics that a recipe declares for goals
and search; and the hooks of Olive's evaluations: ours are made anew in each run, and models are held to the evaluator's
bounds.

Olive knows only its own names of metrics ("accuracy_score", "bytes"); their meaning is decided here. Its cache of
evaluations goes by the model's id: it knows neither the settings nor the data, whatever names these. What an earlier
run has computed is in the journal of answers, which goes by each request. Knows no recipe.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from olive.evaluator.metric_result import MetricResult, joint_metric_key
from olive.evaluator.olive_evaluator import OliveEvaluator

from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, Bound, EvaluationConfig, EvaluationSettings, evaluator_settings
from olive_ext.errors import ConfigError, ContradictionError, ModelError, RequirementError, RunError, named_failures
from olive_ext.model.files.package_config import GENAI_CONFIG, read_json
from olive_ext.report import Metric, Report, write
from olive_ext.report.comparison import ALL
from olive_ext.report.metrics import COMPARISON_NAMES, is_open, listed, matching, non_finite_requests
from olive_ext.report.report import has_several_filters
from olive_ext.report.verdict import EXIT_STATUS
from olive_ext.run import check_complete
from olive_ext.run import evaluate as run_evaluate
from olive_ext.run.bounds import (
    DECLARABLE,
    SIZE_ON_DISK,
    broken_bounds,
    check_declared,
    kept_bounds,
    requested_tasks,
    single_bounds,
    timed_costs,
    why_missing,
    with_measurements,
)
from olive_ext.run.reference.comparison_run import is_own_reference
from olive_ext.workflow.current_run import recorded_failures, requirement_error, running
from olive_ext.workflow.handlers import as_loaded, config_of, is_changed, label, name_of
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
        if (run := running.get()) is not None and config.journal is None and not timed_costs(config):
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
    """`config` with `output_dir` and `sample_log_dir` moved to this model's own sub-folder: one evaluator measures the
    input model and then each output model, and in one folder only the last report would stay."""
    folders = config.written({"output_dir", "sample_log_dir"})
    own = {name: str(Path(folder, label(path))) for name, folder in folders.items() if folder is not None}
    return config.model_copy(update=own)


surfaced = partial(named_failures, kind=RunError)
"""Turns every exception but `OliveExtError`, also of a PythonEnvironment's process, into a `RunError` of one line."""


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
        """Olive's `MetricResult` for a model handler. `metrics` are those that the recipe declares,
        `execution_providers` a name, a list of names or None. Raises an `OliveExtError` for every failure."""
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
    is_clear = name or model.type.lower() != "onnxmodel" or not isinstance(path, str)
    if is_clear or len(list(Path(path).glob("*.onnx"))) == 1:
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
        judged = report.verdict if run.is_search and signal is not None else None
        if judged is not None and comparison is not None and not broken:
            # A claim and damage to files are no bounds of the numbers, by which a search chooses.
            is_broken = comparison.certainty is not None and judged.status == "loss"
            if is_broken or comparison.damaged:
                broken = [replace(judged.reasons[0], words=judged.headline)]
    if not broken:
        return
    error = requirement_error(f"evaluators.{evaluator.name or 'evaluator'}", broken, report)
    if run is None or run.is_search:
        raise error
    run.broken = error


_ONE_OF_ITSELF = ("top1_agreement", "perplexity_ratio", "mcnemar_p")
"""The metrics of a comparison that are 1 for a model compared with itself; the others are 0."""

_READ = ("kl_mean", "top1_agreement", "accuracy_difference", "accuracy_difference_low", "accuracy_difference_high")
"""The metrics of a comparison, over all tasks, that Olive's run history has."""

_KEPT = frozenset((ALL, name) for name in _READ)
_STDERR = "_stderr"

_STANDS_FOR = {
    "accuracy_score": ("acc", "exact_match", "acc_norm", "accuracy", "pass@1", "pass_at_1"),
    "f1_score": ("f1", "f1_score"),
    "perplexity": ("word_perplexity", "perplexity", "token_perplexity", "byte_perplexity"),
}
"""lm-eval's metrics that one of Olive's sub types may mean; the first that the task has is taken. Any other sub type
means the metric of its own name."""


def to_metric_result(report: Report, declared: Iterable[Any] = (), bounds: Iterable[Bound] = ()) -> Any:
    """The report's metrics under `key`, each with its standard error under `<key>_stderr`, without a priority; the
    metrics that have `bounds`; the verdict's exit status; and the declared metrics under their own names.

    Olive prints and keeps these, of a comparison only `_READ`. The report has the rest. `declared` are Olive's `Metric`
    objects. Raises `ConfigError` for one that no metric of the report matches.
    """
    single = single_bounds(bounds, report.metrics, report.comparison.whole_texts() if report.comparison else ())
    bounded = [item for bound in single for item in matching(report.metrics, bound.metric, bound.task, bound.filter)]
    entries = {}
    for item in report.metrics:
        if item.metric not in COMPARISON_NAMES or (item.task, item.metric) in _KEPT or item in bounded:
            holds_none = item.is_of_drawn and item in bounded
            entries[key(item, report)] = _entry(replace(item, value=math.nan) if holds_none else item, -1)
            if item.stderr is not None:
                stderr = replace(item, value=item.stderr, higher_is_better=False)
                entries[f"{key(item, report)}{_STDERR}"] = _entry(stderr, -1)
    broken = tuple(broken_bounds(bounds, report.metrics, report.comparison))
    if (judged := replace(report, broken=broken).verdict) is not None:
        status = Metric("verdict", "status", "none", EXIT_STATUS[judged.status], higher_is_better=False)
        entries[key(status, report)] = _entry(status, -1)
    for metric in declared:
        for sub_type in metric.sub_types:
            value = _matching(metric, sub_type, report)
            if non_finite_requests(report.metrics) or is_open(value, report.metrics):
                value = replace(value, value=math.nan)  # no goal is met by it
            entries[joint_metric_key(metric.name, text_of(sub_type.name))] = _entry(value, sub_type.priority)
    return MetricResult.model_validate(entries)


def broken_in(result: Any, bounds: Iterable[Bound], judge: Callable[..., list[Any]] = broken_bounds) -> list[Any]:
    """As `judge` of `run.bounds`, for a result of `to_metric_result`, whose keys hold less."""
    metrics = []
    for name, entry in result.items():
        if name.endswith(_STDERR):
            continue
        task, _, rest = name.rpartition("-")
        metric, _, filter_name = rest.partition(",")
        metrics.append(Metric(task, metric, filter_name, entry.value, higher_is_better=entry.higher_is_better))
    renamed = (bound.model_copy(update={"filter": bound.filter and bound.filter.replace("-", "_")}) for bound in bounds)
    texts = [item.task for item in metrics if item.metric == "perplexity_ratio" and item.task != ALL]
    return judge(single_bounds(renamed, metrics, texts), metrics)


def key(metric: Metric, report: Report) -> str:
    """`<task>-<metric>`, with `,<filter>` where the task has several filters.

    Olive reads the part after the last "-" as the metric, so that "-" in metric and filter is replaced by "_".
    """
    name = metric.metric
    if has_several_filters(report, metric.task):
        name = f"{name},{metric.filter}"
    return str(joint_metric_key(metric.task, name.replace("-", "_")))


def declared_pairs(metrics: Iterable[Any]) -> list[tuple[str, str]]:
    """Type and name of each of Olive's metrics."""
    return [(text_of(metric.type), metric.name) for metric in metrics]


def _matching(declared: Any, sub_type: Any, report: Report) -> Metric:
    sub_name = text_of(sub_type.name)
    candidates, measured = _meant(declared.name, sub_name, report), DECLARABLE[text_of(declared.type)]
    if not candidates and measured is not None:
        candidates = _meant(measured, sub_name, report)
    if not candidates and report.comparison is None and (name := declared.name.rpartition("/")[2]) in COMPARISON_NAMES:
        is_one = name in _ONE_OF_ITSELF  # the reference itself, which is compared with nothing
        return Metric(ALL, name, "none", float(is_one), higher_is_better=bool(sub_type.higher_is_better))
    if len(candidates) != 1:
        missing = measured or declared.name
        problem = "stands for several metrics" if candidates else why_missing(missing)
        raise ConfigError(
            f"the declared metric '{declared.name}' with sub type '{sub_name}' {problem}; name it as "
            f'"<task>" or "<task>/<metric>" or "<task>/<metric>,<filter>": {listed(candidates or report.metrics)}',
            code="unknown_name",
        )
    answer = candidates[0]
    if answer.higher_is_better is None:
        return replace(answer, higher_is_better=bool(sub_type.higher_is_better))
    if answer.higher_is_better != bool(sub_type.higher_is_better):
        raise ContradictionError(
            f"the declared metric '{declared.name}' says higher_is_better = {str(sub_type.higher_is_better).lower()}, "
            f"but of {answer.task}/{answer.metric} {'higher' if answer.higher_is_better else 'lower'} values are better"
        )
    return answer


def _meant(name: str, sub_name: str, report: Report) -> list[Metric]:
    """The metrics that a declared name and sub type mean; exactly one in a valid recipe."""
    of_task = [metric for metric in report.metrics if metric.task == name]
    if not of_task:
        return matching(report.metrics, name)
    for meaning in (*_STANDS_FOR.get(sub_name, ()), sub_name):
        metrics = [metric for metric in of_task if metric.metric == meaning]
        if metrics:
            return metrics
    return of_task if len(of_task) == 1 and sub_name in ("accuracy_score", "avg") else []


def _entry(metric: Metric, priority: int) -> dict[str, Any]:
    value = int(metric.value) if metric.task == SIZE_ON_DISK else metric.value
    return {"value": value, "priority": priority, "higher_is_better": metric.higher_is_better is not False}


def text_of(name: Any) -> str:
    """The text of a name: Olive's enumerations are strings, on Python 3.10 with a `str()` of their own."""
    return str(getattr(name, "value", name))
