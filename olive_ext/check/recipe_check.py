"""Reads an Olive recipe as far as it concerns this package: our evaluator and pass blocks, and the input model."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olive_ext.check.model_check import Findings, check_model
from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, EvaluationConfig, EvaluationSettings, WorkflowSettings
from olive_ext.errors import ConfigError
from olive_ext.run.bounds import refuse_names
from olive_ext.run.costs import with_costs

_OLIVE_EVALUATOR_KEYS = {"name", "type", "type_args", "user_script", "script_dir", "metrics"}
_OLIVE_PASS_KEYS = {"type", "config", "host", "evaluator"}
_TASK_FILES = (".yaml", ".yml")


@dataclass(frozen=True)
class Block:
    """One evaluator or pass of a recipe: its place, as a dotted key, and its keys."""

    where: str
    keys: Mapping[str, Any]
    is_pass: bool = False

    @property
    def type(self) -> str:
        return str(self.keys.get("type", ""))

    @property
    def is_ours(self) -> bool:
        """Olive reads the types of passes without regard to case or to a leading path."""
        if self.is_pass:
            return self.type.rpartition(".")[2].lower() == PASS_TYPE.lower()
        return self.type == EVALUATOR_TYPE

    def settings(self) -> dict[str, Any]:
        """Our keys, from the block itself and from where Olive also takes them."""
        olive_keys, nested = (_OLIVE_PASS_KEYS, "config") if self.is_pass else (_OLIVE_EVALUATOR_KEYS, "type_args")
        own = {key: value for key, value in self.keys.items() if key not in olive_keys}
        return {**own, **_mapping(self.keys.get(nested))}


def check_recipe(path: str | Path, *, verify: bool = False) -> Findings:
    """Validates our blocks of the recipe at `path`, and resolves its input model where that is an ONNX model on disk.

    Raises `ConfigError` when the file is not a recipe at all.
    """
    recipe = read_recipe(path)
    findings = Findings()
    section = findings.section(f"Recipe {path}")
    if "$schema" in recipe:
        findings.problems.append("unknown key '$schema': Olive refuses it; name the schema in the editor's settings")
    valid: list[WorkflowSettings] = []
    for block in blocks(recipe):
        findings.problems += _problems_of_type(block)
        if block.is_ours:
            with findings.noting_problems():
                settings = WorkflowSettings.parse(block.settings(), block.where)
                section.add(
                    block.where, f"{block.type}, tasks: {', '.join(_task_name(task) for task in settings.tasks)}"
                )
                missing = _missing_files(block, settings)
                findings.problems += missing
                valid.append(settings)
                if not missing:
                    refuse_names(with_costs(settings), block.where, loads_tasks=True)
    if not any(block.is_ours for block in blocks(recipe)):
        findings.problems.append(f"the recipe has no evaluator {EVALUATOR_TYPE} and no pass {PASS_TYPE}")
    findings.problems += _undefined_evaluators(recipe)
    _check_input_model(recipe, valid, findings, verify=verify)
    return findings


def read_recipe(path: str | Path) -> Mapping[str, Any]:
    """The recipe at `path`, JSON or YAML by its name; raises `ConfigError`."""
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        recipe = yaml.safe_load(text) if path.suffix.lower() in _TASK_FILES else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the recipe '{path}': {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"the recipe '{path}' cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, Mapping):
        raise ConfigError(f"the recipe '{path}' holds no mapping of keys")
    return recipe


def blocks(recipe: Mapping[str, Any]) -> Iterator[Block]:
    """Every evaluator and pass of the recipe, those written in place of an evaluator's name too."""
    for name, keys in _mapping(recipe.get("evaluators")).items():
        yield Block(f"evaluators.{name}", _mapping(keys))
    passes = _mapping(recipe.get("passes"))
    for name, entry in passes.items():
        entries = entry if isinstance(entry, list) else [entry]
        for index, keys in enumerate(entries):
            where = f"passes.{name}" if len(entries) == 1 else f"passes.{name}.{index}"
            yield Block(where, _mapping(keys), is_pass=True)
    for where, evaluator in _evaluator_references(recipe):
        if isinstance(evaluator, Mapping):
            yield Block(where, evaluator)


def _evaluator_references(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where Olive takes an evaluator's name or block, and what stands there."""
    yield "evaluator", recipe.get("evaluator")
    yield "engine.evaluator", _mapping(recipe.get("engine")).get("evaluator")
    for name, entry in _mapping(recipe.get("passes")).items():
        for keys in entry if isinstance(entry, list) else [entry]:
            yield f"passes.{name}.evaluator", _mapping(keys).get("evaluator")


def _undefined_evaluators(recipe: Mapping[str, Any]) -> list[str]:
    known = list(_mapping(recipe.get("evaluators")))
    return [
        f"'{where}' = '{name}': not in 'evaluators', which has {', '.join(known) or 'none'}"
        for where, name in _evaluator_references(recipe)
        if isinstance(name, str) and name not in known
    ]


def _problems_of_type(block: Block) -> list[str]:
    ours = PASS_TYPE if block.is_pass else EVALUATOR_TYPE
    if block.is_ours or not difflib.get_close_matches(block.type.lower(), [ours.lower()], cutoff=0.85):
        return []
    return [f"'{block.where}.type' = '{block.type}': did you mean '{ours}'?"]


def _missing_files(block: Block, settings: WorkflowSettings) -> list[str]:
    """Files that the block names; Olive takes relative ones from the working directory."""
    written = settings.include_path or []
    places = [("include_path", place) for place in ([written] if isinstance(written, str) else written)]
    places += [("tasks", task) for task in settings.tasks if isinstance(task, str) and task.endswith(_TASK_FILES)]
    places += [(key, block.keys[key]) for key in ("user_script", "script_dir") if block.keys.get(key)]
    return [f"'{block.where}.{key}' = '{place}': does not exist" for key, place in places if not Path(place).exists()]


def _task_name(task: str | dict[str, Any]) -> str:
    return task if isinstance(task, str) else str(task.get("task", "inline task"))


def _check_input_model(
    recipe: Mapping[str, Any], valid: list[WorkflowSettings], findings: Findings, *, verify: bool
) -> None:
    """With the first valid block's settings; Olive makes other models from it only when it runs."""
    block = _mapping(recipe.get("input_model"))
    keys = {**_mapping(block.get("config")), **block}
    path = keys.get("model_path")
    section = findings.section("Input model")
    section.add("type", block.get("type", "missing"))
    section.add("model_path", path if path is not None else "missing")
    if str(block.get("type", "")).lower() != "onnxmodel" or not isinstance(path, str) or not valid:
        return
    model = {"path": path, "kind": "onnx", "onnx_file_name": keys.get("onnx_file_name")}
    own = valid[0].model_fields_set & set(EvaluationSettings.model_fields)
    values = {name: getattr(valid[0], name) for name in own - {"reference"}}  # which the recipe may yet have to find
    with findings.noting_problems():
        config = EvaluationConfig.parse({**values, "model": model}, "input_model")
        findings.extend(check_model(config, verify=verify, handed_over=_accelerator(recipe)), "input_model")


def _accelerator(recipe: Mapping[str, Any]) -> str | None:
    """The execution provider of the recipe's target, as Olive would hand it over; None where it names none."""
    target = recipe.get("target", _mapping(recipe.get("engine")).get("target"))
    system = _mapping(recipe.get("systems")).get(target) if isinstance(target, str) else target
    keys = {**_mapping(_mapping(system).get("config")), **_mapping(system)}
    accelerators = keys.get("accelerators") or [{}]
    providers = _mapping(accelerators[0]).get("execution_providers") or [None]
    first = providers[0]
    name = first[0] if isinstance(first, list) else first
    return name if isinstance(name, str) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
