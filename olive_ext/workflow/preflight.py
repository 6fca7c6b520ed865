"""This package's evaluators and passes in a recipe, and the refusal of those that cannot work before anything runs.

Olive itself reads an evaluator's keys when it makes the evaluator, which is after the passes, and drops unknown keys of
a pass. Knows nothing of other types' blocks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from olive.evaluator.olive_evaluator import OliveEvaluatorConfig
from olive.systems.common import SystemType

from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, WorkflowSettings
from olive_ext.errors import ConfigError, ModelError
from olive_ext.model.folders import is_hub_name, why_missing
from olive_ext.run.bounds import refuse_names
from olive_ext.run.model_arguments import is_onnx_model, refuse_arguments
from olive_ext.workflow.current_run import with_reference
from olive_ext.workflow.metric_results import check_declared, names_declared, with_measurements

FINGERPRINT = "fingerprint"
"""The parameter that the pass adds to its own configuration."""


def is_ours(evaluator: Any) -> bool:
    """Whether an evaluator configuration has this package's type."""
    return isinstance(evaluator, OliveEvaluatorConfig) and evaluator.type == EVALUATOR_TYPE


def is_our_pass(pass_type: str) -> bool:
    """Whether a pass type is this package's; Olive reads pass types without regard to case or to a leading path."""
    return pass_type.rpartition(".")[2].lower() == PASS_TYPE.lower()


def parse(values: dict[str, Any], where: str = PASS_TYPE) -> WorkflowSettings:
    """The settings in a pass configuration; raises `ConfigError` for unknown keys, which Olive would drop silently."""
    return WorkflowSettings.parse({name: value for name, value in values.items() if name != FINGERPRINT}, where)


def refuse(engine: Any, input_model: Any) -> None:
    """Checks an engine that is about to run; raises `ConfigError` or `ModelError`."""
    for name, config in _passes(engine):
        _refuse_unknown_pass(engine, name, config.type)
    evaluators = list(our_evaluators(engine))
    passes = list(our_passes(engine))
    is_onnx = is_onnx_model(input_model.type)
    for where, evaluator in evaluators:
        check_declared(evaluator.metrics, where)
        settings = WorkflowSettings.parse(evaluator.type_args, where)
        refuse_arguments(settings, where, is_onnx=is_onnx)
        _refuse_settings(settings, where, evaluator.metrics)
    for name, config in passes:
        settings = parse(config.config or {}, f"passes.{name}")
        refuse_arguments(settings, f"passes.{name}", is_onnx=is_onnx)
        _refuse_settings(settings, f"passes.{name}")
    keys = input_model.config
    problem = why_missing(input_model.type.lower(), keys.get("model_path"), keys.get("onnx_file_name"))
    if problem and (evaluators or passes):
        raise ModelError(problem)
    if engine.target_config.type == SystemType.PythonEnvironment:
        for name, config in passes:
            config.config = _with_named_reference(config.config or {}, parse(config.config or {}, f"passes.{name}"))
        for where, evaluator in evaluators:
            evaluator.user_script = evaluator.user_script or str(Path(__file__).with_name("user_script.py"))
            settings = WorkflowSettings.parse(evaluator.type_args, where)
            evaluator.type_args = _with_named_reference(evaluator.type_args, settings)


def _refuse_settings(settings: WorkflowSettings, where: str, declared: Sequence[Any] = ()) -> None:
    """Refuses a reference that cannot be found, and bounds and declared metrics that no report will have."""
    reference = with_reference(settings).reference
    if reference is not None and not Path(reference.path).exists() and not is_hub_name(reference.path):
        raise ModelError(f"'{where}.reference' = '{reference.path}': no such file or folder")
    refuse_names(with_measurements(settings, declared), where, names_declared(declared))


def _with_named_reference(values: dict[str, Any], settings: WorkflowSettings) -> dict[str, Any]:
    """`values` with "input_model" replaced by the input model's path: the process that evaluates knows no workflow."""
    reference = with_reference(settings).reference
    return values if reference is None else {**values, "reference": reference.model_dump(exclude_unset=True)}


def _refuse_unknown_pass(engine: Any, name: str, pass_type: str) -> None:
    """Refuses a type of pass that Olive does not know. Olive itself notices when the pass is to run: behind the
    evaluation of the input model and the passes before it."""
    try:
        engine.olive_config.get_pass_module_config(pass_type)
    except ValueError as error:
        near = difflib.get_close_matches(pass_type, [PASS_TYPE.lower()], n=1)
        hint = f"did you mean '{PASS_TYPE}'?" if near else "Olive knows no such pass"
        raise ConfigError(f"'passes.{name}.type' = '{pass_type}': {hint}") from error


def pass_class(engine: Any, pass_type: str) -> str:
    """The name of a pass's class: Olive reads types without regard to case."""
    return str(engine.olive_config.get_pass_module_config(pass_type).module_path.rpartition(".")[2])


def our_evaluators(engine: Any) -> Iterator[tuple[str, Any]]:
    """This package's evaluators of an engine, each with its place in the recipe."""
    if is_ours(engine.evaluator_config):
        yield f"evaluators.{engine.evaluator_config.name or 'evaluator'}", engine.evaluator_config
    for name, config in _passes(engine):
        if is_ours(config.evaluator):
            yield f"evaluators.{config.evaluator.name or name}", config.evaluator


def our_passes(engine: Any) -> Iterator[tuple[str, Any]]:
    """This package's passes of an engine, each with its name in the recipe."""
    return ((name, config) for name, config in _passes(engine) if is_our_pass(config.type))


def _passes(engine: Any) -> Iterator[tuple[str, Any]]:
    passes = engine.input_passes_configs or {}
    return ((name, config) for name, configs in passes.items() for config in configs)
