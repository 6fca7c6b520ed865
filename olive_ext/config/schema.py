"""JSON schemas of recipes, for editors and for checking recipes. Knows no Olive. Around our own keys stand those that
Olive reads from the same block: `name`, `type`, `user_script`, `script_dir` and `metrics` of an evaluator, `type`,
`host` and `evaluator` of a pass. It also takes our keys inside `type_args` (evaluator) or `config` (pass)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from olive_ext.config.evaluation import EvaluationSettings, EvaluatorSettings
from olive_ext.config.work import PassSettings
from olive_ext.registry import entries, hooks, load

SchemaKind = Literal["evaluator", "pass", "recipe"]
EVALUATOR_TYPE = "OrtLMEvaluator"
PASS_TYPE = "OrtLMEvaluation"
RECIPE_SUFFIXES = (".json", ".yaml", ".yml")
_PASS_DOES = "measures the model and hands it on unchanged"
SCHEMA_KINDS: tuple[SchemaKind, ...] = get_args(SchemaKind)

Json = dict[str, Any]

_EVALUATOR_KEYS: Json = {
    "name": {"type": "string", "description": "Olive's name of the evaluator."},
    "type": {"const": EVALUATOR_TYPE, "description": "This package's evaluator."},
    "user_script": {
        "type": "string",
        "description": "Python file that imports olive_ext.workflow, which makes the type known to plain `olive run`.",
    },
    "script_dir": {"type": "string", "description": "Folder that Olive adds to the import path for `user_script`."},
    "metrics": {
        "type": "array",
        "items": {"type": "object"},
        "description": "Olive metrics that goals and search refer to.",
    },
}
_METRICS_KEYS: Json = {
    **_EVALUATOR_KEYS,
    "metrics": {
        "type": "array",
        "items": {"type": ["object", "string"]},
        "description": "Olive metrics to measure, or their names in the recipe's own list 'metrics'.",
    },
}
_PASS_KEYS: Json = {
    "host": {"type": ["string", "object"], "description": "Olive system the pass runs on."},
    "evaluator": {"type": ["string", "object"], "description": "Olive evaluator of the pass's output model."},
}
_TITLES = {
    "evaluator": f"{EVALUATOR_TYPE} block of an Olive recipe",
    "pass": f"{PASS_TYPE} pass of an Olive recipe",
    "recipe": f"Olive recipe with {EVALUATOR_TYPE} or {PASS_TYPE} blocks",
}


def pass_settings() -> Mapping[str, type[PassSettings]]:
    """The types of the passes of this package and its plug-ins, and their settings."""
    return {PASS_TYPE: EvaluationSettings, **{name: load(one.settings) for name, one in entries("passes").items()}}


def evaluator_settings() -> Mapping[str, type[EvaluationSettings | EvaluatorSettings]]:
    """The types of the evaluators of this package and its plug-ins, and their settings."""
    others = {name: load(one.settings) for name, one in entries("evaluators").items()}
    return {EVALUATOR_TYPE: EvaluationSettings, **others}


def settled_recipe(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe as Olive takes it: plug-ins replace the forms that they add. Raises `ConfigError`."""
    for settle in hooks("settle_recipe").values():
        recipe = settle(recipe)
    return recipe


def settings_of_pass(pass_type: str) -> type[PassSettings] | None:
    """The settings of a pass of this package, else None; Olive reads types without regard to case or a leading path."""
    name = pass_type.rpartition(".")[2].lower()
    return next((settings for known, settings in pass_settings().items() if known.lower() == name), None)


def schema(kind: SchemaKind) -> Json:
    """The schema (draft 7, which editors know best) of one evaluator block, one pass block or a whole recipe."""
    known = {name: _tidy(one.model_json_schema()) for name, one in pass_settings().items()}
    settings = known[PASS_TYPE]
    blocks = {EVALUATOR_TYPE: _block(settings["properties"], _EVALUATOR_KEYS, "type_args")}
    for name, one in entries("evaluators").items():
        own = {**_METRICS_KEYS, "type": {"const": name, "description": f"This package's evaluator {one.description}."}}
        properties = _tidy(load(one.settings).model_json_schema())["properties"]
        blocks[name] = _block(properties, own, "type_args", "metrics")
    does = {PASS_TYPE: _PASS_DOES, **{name: one.description for name, one in entries("passes").items()}}
    for name, keys in known.items():
        own = {"type": {"const": name, "description": f"This package's pass: {does[name]}."}, **_PASS_KEYS}
        blocks[name] = _block(keys["properties"], own, "config")
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": _TITLES[kind]}
    if kind != "recipe":
        block = blocks[EVALUATOR_TYPE if kind == "evaluator" else PASS_TYPE]
        return {**head, **block, "$defs": settings.get("$defs", {})}
    definitions = {name: item for one in known.values() for name, item in one.get("$defs", {}).items()}
    return {**head, **_recipe(), "$defs": {**definitions, **blocks}}


def _block(properties: Json, olive_keys: Json, nested_key: str, needed: str = "tasks") -> Json:
    """Our keys stand in the block itself or under `nested_key`, as Olive allows; `needed` stands in one of them."""
    nested = {
        "type": "object",
        "description": "Another place for the keys of this block.",
        "additionalProperties": False,
        "properties": properties,
    }
    either = [{"required": [needed]}, {"required": [nested_key]}]
    return {
        "type": "object",
        "additionalProperties": False,
        **({"required": ["type", needed]} if needed in olive_keys else {"required": ["type"], "anyOf": either}),
        "properties": {**olive_keys, nested_key: nested, **properties},
    }


def _recipe() -> Json:
    """Checks our blocks wherever Olive takes an evaluator or a pass; all else is Olive's and left open."""
    evaluator = {"allOf": [_when_ours(name) for name in evaluator_settings()]}
    pass_block = {"allOf": [_when_ours(name) for name in pass_settings()], "properties": {"evaluator": evaluator}}
    inline = {"evaluator": evaluator}
    return {
        "type": "object",
        "required": ["input_model"],
        "properties": {
            "input_model": {"type": "object", "required": ["type"], "description": "The model Olive starts from."},
            "evaluators": {"type": "object", "additionalProperties": evaluator},
            "passes": {
                "type": "object",
                "additionalProperties": {"if": {"type": "array"}, "then": {"items": pass_block}, "else": pass_block},
            },
            "engine": {"type": "object", "properties": inline},
            **inline,
        },
    }


def _when_ours(type_name: str) -> Json:
    return {
        "if": {"type": "object", "required": ["type"], "properties": {"type": {"const": type_name}}},
        "then": {"$ref": f"#/$defs/{type_name}"},
    }


def _tidy(value: Any) -> Any:
    """Pydantic's schema in the words of draft 7, without the titles that repeat the key, descriptions on one line."""
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    tidy = {"items" if key == "prefixItems" else key: _tidy(item) for key, item in value.items()}
    if isinstance(tidy.get("description"), str):
        tidy["description"] = " ".join(tidy["description"].split())
    if isinstance(tidy.get("title"), str):
        del tidy["title"]
    return tidy
