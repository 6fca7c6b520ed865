"""A recipe as far as it concerns this package: our evaluator and pass blocks, and the mistakes that its text shows.

Imports nothing that takes long, so that `olive-ext run` can tell mistakes before it imports Olive.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olive_ext.backends.task_folders import task_folders
from olive_ext.backends.task_names import refuse_unknown
from olive_ext.config import EVALUATOR_TYPE, PASS_TYPE, WorkflowSettings
from olive_ext.errors import ConfigError, TaskError
from olive_ext.model.folders import why_missing
from olive_ext.model.package_files import special_kind
from olive_ext.run.costs import COSTS

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
        return {**own, **mapping(self.keys.get(nested))}

    def parsed(self) -> WorkflowSettings:
        """Our keys, validated; raises `ConfigError`."""
        return WorkflowSettings.parse(self.settings(), self.where)


def read_recipe(path: str | Path) -> Mapping[str, Any]:
    """The recipe at `path`, JSON or YAML by its name; raises `ConfigError`."""
    import yaml

    from olive_ext.config.yaml_files import yaml_bytes

    path = Path(path)
    if kind := special_kind(path):
        raise ConfigError(f"the recipe '{path}' is {kind}: give a file")
    try:
        is_yaml = path.suffix.lower() in _TASK_FILES
        recipe = yaml.safe_load(yaml_bytes(path)) if is_yaml else json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe '{path}': {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"the recipe '{path}' cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, Mapping):
        raise ConfigError(f"the recipe '{path}' holds no mapping of keys")
    return recipe


def mistakes(recipe: Mapping[str, Any], *, has_model: bool = True) -> Iterator[str]:
    """What is wrong with the recipe as it is written, a sentence each. `has_model`: the recipe's own model is used."""
    if "$schema" in recipe:
        yield "unknown key '$schema': Olive refuses it; name the schema in the editor's settings"
    for block in blocks(recipe):
        yield from _problems_of_type(block)
        if block.is_ours:
            try:
                yield from what_is_missing(block, block.parsed())
            except ConfigError as error:
                yield str(error)
    yield from _undefined_evaluators(recipe)
    kind, keys = input_model(recipe)
    if has_model and (problem := why_missing(kind, keys.get("model_path"), keys.get("onnx_file_name"))):
        yield problem


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


def _undefined_evaluators(recipe: Mapping[str, Any]) -> list[str]:
    known = list(mapping(recipe.get("evaluators")))
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


def what_is_missing(block: Block, settings: WorkflowSettings) -> list[str]:
    """A sentence for each file that the block names and that is not there, seen from the working directory; where all
    are, one for the tasks that no file defines."""
    written = settings.include_path or []
    places = [("include_path", place) for place in ([written] if isinstance(written, str) else written)]
    places += [("tasks", task) for task in settings.tasks if isinstance(task, str) and task.endswith(_TASK_FILES)]
    places += [(key, block.keys[key]) for key in ("user_script", "script_dir") if block.keys.get(key)]
    missing = [(key, place) for key, place in places if not Path(place).exists()]
    if missing:
        return [f"'{block.where}.{key}' = '{place}': does not exist" for key, place in missing]
    try:
        refuse_unknown([task for task in settings.tasks if task not in COSTS], task_folders(settings.include_path))
    except TaskError as error:
        return [f"'{block.where}.tasks': {error}"]
    return []


def mapping(value: Any) -> Mapping[str, Any]:
    """`value`, or an empty mapping where it is none."""
    return value if isinstance(value, Mapping) else {}
