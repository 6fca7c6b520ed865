"""Registers the evaluator and the passes with Olive, hooks them into Olive's engine, and mends what Olive 0.13 gets
wrong for them and for `OnnxConversion`. Other evaluators and passes keep Olive's behaviour. Knows no model."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from olive.cache import OliveCache
from olive.common.config_utils import load_config_file
from olive.engine import Engine
from olive.engine.footprint import FootprintNode
from olive.evaluator.metric_result import joint_metric_key
from olive.evaluator.registry import Registry
from olive.package_config import OlivePackageConfig
from olive.passes import PassModuleConfig
from olive.systems.common import SystemType
from olive.systems.python_environment import PythonEnvironmentSystem
from olive.systems.system_config import SystemConfig
from olive.telemetry.telemetry import Telemetry
from olive.workflows.run import config as run_config

from olive_ext.config import EVALUATOR_TYPE, settings_of_pass, settled_recipe
from olive_ext.config.base import word
from olive_ext.config.pass_options import unknown_keys
from olive_ext.errors import combined
from olive_ext.registry import entries, load
from olive_ext.workflow.current_run import evaluate_in_environment, restore_run, run_in_environment
from olive_ext.workflow.evaluator import OrtLMEvaluator, evaluate_model, pass_by
from olive_ext.workflow.olive_run import end_in_lines, run, run_in_container
from olive_ext.workflow.passes import OrtLMEvaluation, load_run, run_pass
from olive_ext.workflow.preflight import is_our_pass, our_evaluators

Hook = Callable[[Any, dict[str, Any], Callable[..., Any]], Any]
"""Takes the object (or the module), the arguments of the call by name, and `original(**changes)`, which calls the
wrapped function with these arguments and the changes."""

_MARK = "_wrapped_by_olive_ext"


def wrap_once(owner: Any, name: str, hook: Hook) -> None:
    """Replaces the method `name` of the class `owner`, or the function of a module, by `hook`, once."""
    wrapped = getattr(owner, name)
    if getattr(wrapped, _MARK, False):
        return
    signature = inspect.signature(wrapped)

    @functools.wraps(wrapped)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)

        def original(**changes: Any) -> Any:
            bound.arguments.update(changes)
            return wrapped(*bound.args, **bound.kwargs)

        return hook(args[0] if isinstance(owner, type) else owner, bound.arguments, original)

    setattr(replacement, _MARK, True)
    setattr(owner, name, replacement)


def register() -> None:
    """Registers all types and mends Olive's engine for them; may be called again. In a process of a PythonEnvironment
    the workflow's run is the one in progress from then on."""
    silence()
    restore_run()
    end_in_lines()
    if Registry.get(EVALUATOR_TYPE) is not OrtLMEvaluator:
        Registry.register(EVALUATOR_TYPE)(OrtLMEvaluator)
    for evaluator in entries("evaluators").values():
        importlib.import_module(evaluator.module)
    # A table of passes that a recipe brings along (--package-config) replaces Olive's own: one that we had added an
    # entry to would be gone. Every way to a pass leads through this method.
    wrap_once(OlivePackageConfig, "get_pass_module_config", get_pass_module_config)
    wrap_once(OlivePackageConfig, "import_pass_module", import_pass_module)
    wrap_once(OliveCache, "load_run_from_model_id", load_run)
    wrap_once(SystemConfig, "create_system", create_system)
    wrap_once(PythonEnvironmentSystem, "run_pass", run_in_environment)
    wrap_once(PythonEnvironmentSystem, "evaluate_model", evaluate_in_environment)
    hook_engine(Engine)
    wrap_once(FootprintNode, "update", update_node)
    wrap_once(run_config, "validate_config", validate_config)
    wrap_once(run_config.RunConfig, "parse_file_or_obj", parse_recipe)


def hook_engine(engine: type) -> None:
    """Wraps seven methods of Olive's engine, once."""
    wrap_once(engine, "run", run)
    wrap_once(engine, "initialize", initialize)
    wrap_once(engine, "resolve_goals", resolve_goals)
    wrap_once(engine, "_run_pass", run_pass)
    wrap_once(engine, "_load_evaluation", pass_by)
    wrap_once(engine, "_cache_evaluation", pass_by)
    wrap_once(engine, "_evaluate_model", evaluate_model)


def get_pass_module_config(package: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """Olive's description of a pass, and ours of our own, on the target: Olive then checks its execution providers."""
    try:
        return original()
    except ValueError:
        if not is_our_pass(arguments["pass_type"]):
            raise
    kinds = [OrtLMEvaluation, *(load(entry.kind) for entry in entries("passes").values())]
    kind = next(one for one in kinds if one.settings_type is settings_of_pass(arguments["pass_type"]))
    supports_all = {name: ["*"] for name in PassModuleConfig.model_fields if name.startswith("supported_")}
    return PassModuleConfig(module_path=f"{kind.__module__}.{kind.__name__}", run_on_target=True, **supports_all)


def create_system(config: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `SystemConfig.create_system`, which imports the Docker system: that needs the package docker."""
    system = original()
    if config.type == SystemType.Docker:
        wrap_once(type(system), "run_workflow", run_in_container)
    return system


def import_pass_module(package: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """Olive's class of a pass; `OnnxConversion` and `ModelBuilder` are mended. Their modules import torch, so they are
    imported only when they are needed."""
    kind = original()
    if kind.__module__ == "olive.passes.onnx.conversion":
        wrap_once(sys.modules[kind.__module__], "_convert_dynamic_shapes_for_dynamic_cache", shapes_in_order)
    if kind.__name__ == "ModelBuilder":
        wrap_once(kind, "_run_for_config", build_without_code)
    return kind


def build_without_code(builder: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `ModelBuilder`: Python of the model's folder runs where the recipe trusts it (`load_kwargs` of the
    model, or `hf_remote` of the pass). onnxruntime-genai's builder runs it by itself."""
    model, config = arguments["model"], arguments["config"]
    load_kwargs: Mapping[str, Any] = model.get_load_kwargs() if hasattr(model, "get_load_kwargs") else {}
    options = {"hf_remote": bool(load_kwargs.get("trust_remote_code")), **(config.extra_options or {})}
    return original(config=config.model_copy(update={"extra_options": options}))


def silence() -> None:
    """Olive 0.13 sends its first telemetry message, and writes an id of this machine into the user's cache, before it
    reads OLIVE_DISABLE_TELEMETRY. It does neither if the variable CI is set. Plain `olive run` has done it by now, and
    would wait up to 11 s for that message at its end: it waits from here on, beside the work."""
    if os.environ.get("OLIVE_DISABLE_TELEMETRY") != "1":
        return
    kept = os.environ.get("CI")
    os.environ["CI"] = "1"
    try:
        messages = Telemetry()  # the only one of the process
    finally:
        os.environ.pop("CI") if kept is None else os.environ.update(CI=kept)
    messages.disable_telemetry()
    threading.Thread(target=messages.shutdown, daemon=True).start()


def shapes_in_order(module: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> dict[str, Any]:
    """The hook of Olive's conversion of a KV cache's shapes, with which `OnnxConversion` exports decoders.

    torch wants the shapes of an object's tensors in the order of its fields. Olive 0.13 gives those of a KV cache by
    the fields' names, and every export of a decoder fails ("Node type mismatch").
    """
    shapes: dict[str, Any] = original()
    past = shapes.get("past_key_values")
    return {**shapes, "past_key_values": list(past.values())} if isinstance(past, Mapping) else shapes


def validate_config(module: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `validate_config` where Olive reads recipes: a pass's "evaluator" may be a name, as Olive says.

    Olive 0.13 validates passes before it replaces names of evaluators, because pydantic calls validators in the reverse
    order; a name then ends as "'str' object has no attribute 'get'".
    """
    config, is_pass = arguments["config"], arguments["instance_class"] is module.RunPassConfig
    if not is_pass or not isinstance(config, dict) or not isinstance(name := config.get("evaluator"), str):
        return original()
    valid = original(config={**config, "evaluator": None})
    valid.evaluator = name
    return valid


def parse_recipe(recipe: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `RunConfig.parse_file_or_obj`: rewrites what plug-ins allow in other forms, and refuses an unknown
    key at the top in one line."""
    known = arguments["file_or_obj"]
    keys = settled_recipe(known if isinstance(known, dict) else load_config_file(known))
    if unknown := list(unknown_keys(keys)):
        raise combined(unknown)
    return original(file_or_obj=keys)


def initialize(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> None:
    """The hook of `Engine.initialize`: undoes that it turns a metric's name into a path where it is a task's."""
    original()
    for _, evaluator in our_evaluators(engine):
        for metric in evaluator.metrics:
            metric.name = word(metric.name)


def resolve_goals(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `Engine.resolve_goals`: adds the thresholds of our evaluators' metrics.

    Olive 0.13 returns no goals at all where every goal is a threshold: it looks for the input model's numbers, which
    only the other types of goal need, and gives up without them.
    """
    goals, metrics = original(), arguments["metrics"]
    if not any(metrics is evaluator.metrics for _, evaluator in our_evaluators(engine)):
        return goals
    thresholds = {
        joint_metric_key(metric.name, sub_type.name): sub_type.goal.value
        for metric in metrics
        for sub_type in metric.sub_types
        if sub_type.priority > 0 and sub_type.goal is not None and sub_type.goal.type == "threshold"
    }
    return {**thresholds, **{name: goal for name, goal in goals.items() if goal is not None}}


def update_node(node: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> None:
    """The hook of `FootprintNode.update`, which Olive calls where candidates share their first passes. Olive 0.13
    writes to the field by its alias "model_config", which pydantic refuses: every candidate after the first fails."""
    values = arguments.get("kwargs", {})
    original(kwargs={"model_config_data" if name == "model_config" else name: item for name, item in values.items()})
