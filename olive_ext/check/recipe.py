"""A recipe as far as it concerns this package: our evaluator and pass blocks, and the mistakes that its text shows.

Imports nothing that takes long, so that `olive-ext run` can tell mistakes before it imports Olive.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from olive_ext.backends.task_names import refuse_unknown, task_folders
from olive_ext.config import (
    EvaluatorSettings,
    PassSettings,
    WorkflowSettings,
    evaluator_settings,
    pass_settings,
    settings_of_pass,
    settled_recipe,
)
from olive_ext.config.pass_options import unknown_keys, unknown_options
from olive_ext.errors import ConfigError, MissingError, NotFoundError, OliveExtError, TaskError, keys_once, special_kind
from olive_ext.model.files.folders import why_missing
from olive_ext.registry import evaluators, load

_OLIVE_EVALUATOR_KEYS = {"name", "type", "type_args", "user_script", "script_dir", "metrics"}
_OLIVE_PASS_KEYS = {"type", "config", "host", "evaluator"}
_TASK_FILES = (".yaml", ".yml")
_TYPES_WITH_PATH = ("hfmodel", "onnxmodel")
"""Types of Olive's models that are nothing without a path; others may have a loader or components."""

Settings: TypeAlias = PassSettings | EvaluatorSettings
SettingsType: TypeAlias = type[Settings]


@dataclass(frozen=True)
class Block:
    """One evaluator or pass of a recipe: its place, as a dotted key, and its keys."""

    where: str
    keys: Mapping[str, Any]
    is_pass: bool = False

    @property
    def type(self) -> str:
        """The type as it is written; empty where it is missing."""
        return str(self.keys.get("type", ""))

    @property
    def is_ours(self) -> bool:
        """Whether the type is this package's."""
        return self.settings_type is not None

    @property
    def settings_type(self) -> SettingsType | None:
        """What the block's own keys are; None of a block of others'."""
        if self.is_pass:
            return settings_of_pass(self.type)
        return evaluator_settings().get(self.type)

    def settings(self) -> dict[str, Any]:
        """The block's own keys, without Olive's, from the block itself and from where Olive also takes them."""
        olive_keys, nested = (_OLIVE_PASS_KEYS, "config") if self.is_pass else (_OLIVE_EVALUATOR_KEYS, "type_args")
        own = {key: value for key, value in self.keys.items() if key not in olive_keys}
        return {**own, **mapping(self.keys.get(nested))}

    def parsed(self) -> Settings:
        """The keys of a block of ours, validated; raises `ConfigError`."""
        return (self.settings_type or WorkflowSettings).parse(self.settings(), self.where)


def read_recipe(path: str | Path) -> Mapping[str, Any]:
    """The recipe at `path`, JSON or YAML by its name; raises `ConfigError`."""
    import yaml

    from olive_ext.config.yaml_files import doubled_key, yaml_bytes

    path = Path(path)
    if kind := special_kind(path):
        raise ConfigError(f"the recipe '{path}' is {kind}: give a file", code="no_access")
    try:
        is_yaml = path.suffix.lower() in _TASK_FILES
        if is_yaml and (twice := doubled_key(yaml_bytes(path))):
            raise ValueError(twice)
        recipe = (
            yaml.safe_load(yaml_bytes(path))
            if is_yaml
            else json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=keys_once)
        )
    except OSError as error:
        raise ConfigError(f"cannot read the recipe '{path}': {error.strerror or error}", code="no_access") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"cannot parse the recipe '{path}': {' '.join(str(error).split())}", code="damaged"
        ) from error
    if not isinstance(recipe, Mapping):
        raise ConfigError(f"the recipe '{path}' holds no mapping of keys", code="damaged")
    return recipe


def mistakes(recipe: Mapping[str, Any], *, has_model: bool = True) -> Iterator[OliveExtError]:
    """What is wrong with the recipe as it is written. `has_model`: the recipe's own model is used."""
    if "$schema" in recipe:
        told = "unknown key '$schema': Olive refuses it; name the schema in the editor's settings"
        yield ConfigError(told, "$schema", code="unknown_key")
    yield from _no_mappings(recipe)
    try:
        recipe = settled_recipe(recipe)
    except ConfigError as error:
        yield error
    yield from unknown_keys(recipe)
    for block in blocks(recipe):
        yield from _problems_of_type(block)
        if block.is_ours:
            try:
                yield from _mistakes_of(recipe, block, block.parsed())
            except ConfigError as error:
                yield error
        elif block.is_pass:
            yield from unknown_options(block.type, block.settings(), block.where)
    yield from _undefined(recipe, "evaluators", _evaluator_references(recipe))
    yield from _undefined(recipe, "systems", _system_references(recipe))
    if has_model:
        yield from _problems_of_model(recipe)


def _mistakes_of(recipe: Mapping[str, Any], block: Block, settings: Settings) -> Iterator[OliveExtError]:
    if not isinstance(settings, EvaluatorSettings):
        yield from what_is_missing(block, settings)
        return
    yield from load(evaluators()[block.type].mistakes)(recipe, block.where, block.keys.get("metrics"), settings)
    if (script := block.keys.get("user_script")) and not Path(script).exists():
        yield ConfigError("does not exist", f"{block.where}.user_script", script, code="not_found")


def _problems_of_model(recipe: Mapping[str, Any]) -> list[OliveExtError]:
    kind, keys = input_model(recipe)
    path = keys.get("model_path")
    if not kind:
        return [MissingError("missing: give 'HfModel' or 'ONNXModel', for instance", "input_model.type")]
    if path is None and kind in _TYPES_WITH_PATH:
        near = difflib.get_close_matches("model_path", [key for key in keys if key != "model_path"], n=1)
        hint = f"did you mean it by '{near[0]}'?" if near else "give a folder, a file or a name on the hub"
        return [MissingError(f"missing key 'input_model.model_path': {hint}", "input_model.model_path")]
    problem = why_missing(kind, path, keys.get("onnx_file_name"))
    return [NotFoundError(problem).about("input_model.model_path", path)] if problem else []


def input_model(recipe: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Type of the recipe's input model, in lower case, and its keys, those of its `config` too."""
    block = mapping(recipe.get("input_model"))
    return str(block.get("type", "")).lower(), {**mapping(block.get("config")), **block}


def blocks(recipe: Mapping[str, Any]) -> Iterator[Block]:
    """Every evaluator and pass of the recipe, those written in place of an evaluator's name too."""
    for name, keys in mapping(recipe.get("evaluators")).items():
        yield Block(f"evaluators.{name}", mapping(keys))
    passes = mapping(recipe.get("passes"))
    for name, entry in passes.items():
        entries = entry if isinstance(entry, list) else [entry]
        for index, keys in enumerate(entries):
            where = f"passes.{name}" if len(entries) == 1 else f"passes.{name}.{index}"
            yield Block(where, mapping(keys), is_pass=True)
    for where, evaluator in _evaluator_references(recipe):
        if isinstance(evaluator, Mapping):
            yield Block(where, evaluator)


def _evaluator_references(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where Olive takes an evaluator's name or block, and what stands there."""
    yield "evaluator", recipe.get("evaluator")
    yield "engine.evaluator", mapping(recipe.get("engine")).get("evaluator")
    for name, entry in mapping(recipe.get("passes")).items():
        for keys in entry if isinstance(entry, list) else [entry]:
            yield f"passes.{name}.evaluator", mapping(keys).get("evaluator")


def _system_references(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where Olive takes a system's name or block, and what stands there."""
    for key in ("host", "target"):
        yield key, recipe.get(key)
        yield f"engine.{key}", mapping(recipe.get("engine")).get(key)
    for block in blocks(recipe):
        if block.is_pass:
            yield f"{block.where}.host", block.keys.get("host")


def _undefined(recipe: Mapping[str, Any], section: str, references: Iterable[tuple[str, Any]]) -> list[OliveExtError]:
    known = list(mapping(recipe.get(section)))
    return [
        ConfigError(f"not in '{section}', which has {', '.join(known) or 'none'}", where, name, code="unknown_name")
        for where, name in references
        if isinstance(name, str) and name not in known
    ]


def _no_mappings(recipe: Mapping[str, Any]) -> Iterator[OliveExtError]:
    """An error for each part of the recipe that is to be a mapping of names or of keys, and is not."""
    for section in ("systems", "evaluators", "passes"):
        entries = recipe.get(section)
        if entries is not None and not isinstance(entries, Mapping):
            told = f"a {_kind(entries)} was given: give a mapping, each entry under a name of its own"
            yield ConfigError(told, section).about(section, entries)
        for name, entry in mapping(entries).items():
            is_chain = section == "passes" and isinstance(entry, list)
            for keys in entry if is_chain else [entry]:
                if not isinstance(keys, Mapping):
                    yield ConfigError("give a mapping with the key 'type'", f"{section}.{name}", keys)
    if not isinstance(recipe.get("engine", {}), Mapping | None):
        yield ConfigError("give a mapping", "engine", recipe["engine"])


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "text" if isinstance(value, str) else type(value).__name__


def _problems_of_type(block: Block) -> list[OliveExtError]:
    ours = {name.lower(): name for name in (pass_settings() if block.is_pass else evaluator_settings())}
    near = difflib.get_close_matches(block.type.lower(), ours, n=1, cutoff=0.85)
    if block.is_ours or not near:
        return []
    meant = f"did you mean '{ours[near[0]]}'?"
    return [ConfigError(meant, f"{block.where}.type", block.type, code="unknown_name")]


def what_is_missing(block: Block, settings: PassSettings) -> list[OliveExtError]:
    """An error for each file that the block names and that is not there, seen from the working directory; where all
    are, one for the tasks that no file defines."""
    written = settings.include_path or []
    paths = [("include_path", path) for path in ([written] if isinstance(written, str) else written)]
    paths += [("tasks", task) for task in settings.tasks if isinstance(task, str) and task.endswith(_TASK_FILES)]
    paths += [(key, block.keys[key]) for key in ("user_script", "script_dir") if block.keys.get(key)]
    if missing := [(key, path) for key, path in paths if not Path(path).exists()]:
        where = block.where
        return [ConfigError("does not exist", f"{where}.{key}", path, code="not_found") for key, path in missing]
    from olive_ext.run.costs import COSTS

    try:
        refuse_unknown([task for task in settings.tasks if task not in COSTS], task_folders(settings.include_path))
    except TaskError as error:
        return [error.inside(f"'{block.where}.tasks'", f"{block.where}.tasks")]
    return []


def mapping(value: Any) -> Mapping[str, Any]:
    """`value`, or an empty mapping where it is none."""
    return value if isinstance(value, Mapping) else {}
