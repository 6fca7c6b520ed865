"""This package's evaluators and passes in a recipe, and the refusal of those that cannot work before anything runs.

Olive itself reads an evaluator's keys when it makes the evaluator, which is after the passes, and drops unknown keys of
a pass. Knows nothing of other types' blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from olive.evaluator.olive_evaluator import OliveEvaluatorConfig
from olive.systems.common import SystemType
from olive.systems.system_config import SystemConfig

from olive_ext.check.recipe import Passes, mistakes
from olive_ext.check.recipe import refuse as refuse_all
from olive_ext.config import (
    AT_HAND,
    EXPORT,
    ReferenceConfig,
    StrictModel,
    evaluator_settings,
    pass_settings,
    settings_of_pass,
)
from olive_ext.errors import ContradictionError
from olive_ext.run.bounds import COSTS

Settings = TypeVar("Settings", bound=StrictModel)

FINGERPRINT = "fingerprint"
"""The parameter that the pass adds to its own configuration."""


def is_ours(evaluator: Any) -> bool:
    """Whether an evaluator configuration has one of this package's types."""
    return isinstance(evaluator, OliveEvaluatorConfig) and evaluator.type in evaluator_settings()


def has_only_costs(evaluator: Any) -> bool:
    """Whether an evaluator of ours measures no answers."""
    names = evaluator.type_args.get("tasks") or [metric.type for metric in evaluator.metrics]
    return all(name in (*COSTS, "latency", "throughput") for name in names)


def is_our_pass(pass_type: str) -> bool:
    """Whether a pass type is this package's."""
    return settings_of_pass(pass_type) is not None


def parse(kind: type[Settings], values: dict[str, Any]) -> Settings:
    """The settings in the configuration of a pass. Raises `ConfigError` for unknown keys, which Olive would drop."""
    name = next(name for name, known in pass_settings().items() if known is kind)
    return kind.parse({name: value for name, value in values.items() if name != FINGERPRINT}, name)


def refuse(engine: Any, input_model: Any, *, evaluate_input_model: bool = True) -> None:
    """Checks an engine that is about to run; raises `OliveExtError`."""
    evaluators, passes = list(our_evaluators(engine)), list(our_passes(engine))
    written = {
        "input_model": {"type": input_model.type, "config": input_model.config},
        "target": engine.target_config.to_json(),
        "evaluate_input_model": evaluate_input_model,
        "passes": {
            name: [
                {"type": config.type, "config": config.config or {}, "host": _type_of(engine, config.host)}
                for config in configs
            ]
            for name, configs in (engine.input_passes_configs or {}).items()
        },
        "evaluators": {
            where.partition(".")[2]: {
                "type": evaluator.type,
                "type_args": evaluator.type_args,
                "metrics": [metric.to_json() for metric in evaluator.metrics],
            }
            for where, evaluator in evaluators
        },
    }
    known = {name: kind.module_path for name, kind in engine.olive_config.passes.items()}  # a recipe may bring its own
    refuse_all(mistakes(written, Passes(known, are_all=True), has_model=bool(evaluators or passes), runs=True))
    if engine.target_config.type == SystemType.PythonEnvironment:
        for _, evaluator in evaluators:
            evaluator.user_script = evaluator.user_script or str(Path(__file__).with_name("user_script.py"))
        for where, reference in references(engine):
            if reference.float_model == AT_HAND:
                problem = f"a PythonEnvironment knows no earlier passes: give a path, or '{EXPORT}'"
                raise ContradictionError(problem, f"{where}.reference.float_model", AT_HAND)


def _type_of(engine: Any, host: Any) -> dict[str, Any]:
    """A pass's host as a recipe writes it, as far as it says where the pass runs."""
    system = host or engine.host_config
    return {"type": system.type.value} if isinstance(system, SystemConfig) else {}


def references(engine: Any) -> Iterator[tuple[str, ReferenceConfig]]:
    """The references that this package's evaluators and passes name, each with the dotted key of what names it."""
    keys = {where: evaluator.type_args for where, evaluator in our_evaluators(engine)}
    keys |= {f"passes.{name}": config.config or {} for name, config in our_passes(engine)}
    named = ((where, reference_of(own)) for where, own in keys.items())
    return ((where, reference) for where, reference in named if reference is not None)


def reference_of(keys: Mapping[str, Any]) -> ReferenceConfig | None:
    """The reference among the keys of an evaluator or a pass, as they are written or as Olive has read them."""
    written = keys.get("reference")
    if written is None:
        return None
    return ReferenceConfig.parse({"path": written} if isinstance(written, str) else written)


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
