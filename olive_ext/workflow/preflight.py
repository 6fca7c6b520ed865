"""This package's evaluators and passes in a recipe, and the refusal of those that cannot work before anything runs.

Olive itself reads an evaluator's keys when it makes the evaluator, which is after the passes, and drops unknown keys of
a pass. Knows nothing of other types' blocks.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from olive.evaluator.olive_evaluator import OliveEvaluatorConfig
from olive.hardware.accelerator import AcceleratorSpec
from olive.package_config import OlivePackageConfig
from olive.systems.common import SystemType

from olive_ext.config import (
    AT_HAND,
    EVALUATOR_TYPE,
    EXPORT,
    EvaluatorSettings,
    PassSettings,
    Strict,
    WorkflowSettings,
    evaluator_settings,
    pass_settings,
    settings_of_pass,
)
from olive_ext.config.pass_options import unknown_options
from olive_ext.config.work import NEEDS_ONNX
from olive_ext.errors import ConfigError, ContradictionError, NotFoundError, UnsupportedError, joined
from olive_ext.model.files.folders import is_hub_name, why_missing
from olive_ext.registry import evaluators, load
from olive_ext.run.bounds import refuse_names
from olive_ext.run.task_fit import is_onnx_model, refuse_arguments
from olive_ext.workflow.current_run import logger, settled
from olive_ext.workflow.metric_results import check_declared, names_declared, with_measurements

Settings = TypeVar("Settings", bound=Strict)

FINGERPRINT = "fingerprint"
"""The parameter that the pass adds to its own configuration."""


def is_ours(evaluator: Any) -> bool:
    """Whether an evaluator configuration has one of this package's types."""
    return isinstance(evaluator, OliveEvaluatorConfig) and evaluator.type in evaluator_settings()


def is_our_pass(pass_type: str) -> bool:
    """Whether a pass type is this package's."""
    return settings_of_pass(pass_type) is not None


def is_evaluation(pass_type: str) -> bool:
    """Whether a pass type is the one that makes reports."""
    return settings_of_pass(pass_type) is WorkflowSettings


def parse(kind: type[Settings], values: dict[str, Any], where: str = "") -> Settings:
    """The settings in the configuration of a pass; raises `ConfigError` for unknown keys, which Olive would drop
    silently."""
    name = next(name for name, known in pass_settings().items() if known is kind)
    return kind.parse({name: value for name, value in values.items() if name != FINGERPRINT}, where or name)


def refuse(engine: Any, input_model: Any) -> None:
    """Checks an engine that is about to run; raises `ConfigError` or `ModelError`."""
    for name, config in _passes(engine):
        _refuse_unknown_pass(engine, name, config.type)
        if unknown := list(unknown_options(config.type, config.config or {}, f"passes.{name}")):
            raise joined(unknown)
    ours = list(our_evaluators(engine))
    passes = list(our_passes(engine))
    is_onnx = is_onnx_model(input_model.type)
    for name, config in _passes(engine):
        where, values = f"passes.{name}", config.config or {}
        if is_evaluation(config.type):
            settings = parse(WorkflowSettings, values, where)
            refuse_arguments(settings, where, is_onnx=is_onnx)
            _refuse_reference(settings, where)
            refuse_names(with_measurements(settings), where, names_declared(()))
        elif is_our_pass(config.type):
            if not is_onnx:
                raise UnsupportedError(f"'{where}': {NEEDS_ONNX}", where)
            _refuse_reference(parse(settings_of_pass(config.type) or WorkflowSettings, values, where), where)
        is_onnx |= makes_onnx(config.type, engine.olive_config)
    for where, evaluator in ours:
        if evaluator.type != EVALUATOR_TYPE:
            declared = evaluator_settings()[evaluator.type].parse(evaluator.type_args, where)
            _refuse_reference(declared, where)
            load(evaluators()[evaluator.type].refuse)(evaluator.metrics, where, declared)
            continue
        check_declared(evaluator.metrics, where)
        settings = WorkflowSettings.parse(evaluator.type_args, where)
        refuse_arguments(settings, where, is_onnx=is_onnx)
        _refuse_reference(settings, where)
        refuse_names(with_measurements(settings, evaluator.metrics), where, names_declared(evaluator.metrics))
    keys = input_model.config
    problem = why_missing(input_model.type.lower(), keys.get("model_path"), keys.get("onnx_file_name"))
    if problem and (ours or passes):
        raise NotFoundError(problem).about("input_model.model_path", keys.get("model_path"))
    if engine.target_config.type == SystemType.PythonEnvironment:
        for name, config in passes:
            kind = settings_of_pass(config.type) or WorkflowSettings
            config.config = _with_named_reference(config.config or {}, kind, f"passes.{name}")
        for where, evaluator in ours:
            evaluator.user_script = evaluator.user_script or str(Path(__file__).with_name("user_script.py"))
            own = evaluator_settings()[evaluator.type]
            evaluator.type_args = _with_named_reference(evaluator.type_args, own, where)


def _refuse_reference(settings: PassSettings | EvaluatorSettings, where: str) -> None:
    """Refuses a reference that cannot be found."""
    reference = settings.reference and settled(settings.reference)
    if reference is None or reference.is_same:
        return
    if not Path(reference.path).exists() and not is_hub_name(reference.path):
        raise NotFoundError("no such file or folder", f"{where}.reference", reference.path)


def _with_named_reference(
    values: dict[str, Any], kind: type[PassSettings | EvaluatorSettings], where: str
) -> dict[str, Any]:
    """`values` with "input_model" replaced by the input model's path: the process that evaluates knows no workflow."""
    settings = kind.parse({name: value for name, value in values.items() if name != FINGERPRINT}, where)
    if settings.reference is not None and settings.reference.float_model == AT_HAND:
        raise ContradictionError(
            f"a PythonEnvironment knows no earlier passes: give a path, or '{EXPORT}'",
            f"{where}.reference.float_model",
            AT_HAND,
        )
    reference = settings.reference and settled(settings.reference)
    if reference is None:
        return values
    ways = {"mode"} if issubclass(kind, EvaluatorSettings) else set()  # metrics have one way alone
    return {**values, "reference": reference.model_dump(exclude_unset=True, exclude=ways)}


def _refuse_unknown_pass(engine: Any, name: str, pass_type: str) -> None:
    """Refuses a type of pass that Olive does not know. Olive itself notices when the pass is to run: behind the
    evaluation of the input model and the passes before it."""
    try:
        engine.olive_config.get_pass_module_config(pass_type)
    except ValueError as error:
        near = nearest_pass(pass_type, engine.olive_config)
        hint = f"did you mean '{near}'?" if near else "Olive knows no such pass"
        raise ConfigError(f"{hint}", f"passes.{name}.type", pass_type, code="unknown_name") from error


def nearest_pass(pass_type: str, package: Any = None) -> str:
    """The pass that a type unknown to Olive was probably meant to be; empty where there is none, and for a type that
    Olive knows. `package` is the table of passes in use."""
    passes = (package or OlivePackageConfig.load_default_config()).passes
    names = {name: kind.module_path.rpartition(".")[2] for name, kind in passes.items()}
    names |= {name.lower(): name for name in pass_settings()}
    near = difflib.get_close_matches(pass_type.lower(), names, n=1, cutoff=0.8)
    return names[near[0]] if near and pass_type.lower() not in names else ""


def pass_class(engine: Any, pass_type: str) -> str:
    """The name of a pass's class: Olive reads types without regard to case."""
    return str(engine.olive_config.get_pass_module_config(pass_type).module_path.rpartition(".")[2])


def our_evaluators(engine: Any) -> Iterator[tuple[str, Any]]:
    """This package's evaluators of an engine, each with its dotted key in the recipe."""
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


def makes_onnx(pass_type: str, package: Any = None) -> bool:
    """Whether the pass is one of Olive's that make ONNX models; `package` is the table of passes in use."""
    try:
        return bool((package or OlivePackageConfig.load_default_config()).is_onnx_module(pass_type))
    except ValueError:  # a pass that this Olive does not know
        return False


def parameters_of(pass_type: str) -> Collection[str]:
    """The names of a pass's parameters; empty where Olive does not know the pass, or cannot import it here."""
    try:
        kind = OlivePackageConfig.load_default_config().import_pass_module(pass_type)
        return list(kind.default_config(AcceleratorSpec("cpu", "CPUExecutionProvider")))
    except Exception as error:  # noqa: BLE001 - of whatever the pass's module imports
        logger.info("the keys of the pass '%s' are not checked: %s", pass_type, error)
        return []
