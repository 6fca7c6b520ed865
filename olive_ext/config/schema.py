"""JSON schemas of what a recipe may say, for editors and for checking recipes. Knows no Olive.

Around our own keys stand those that Olive reads from the same block: `name`, `type`, `user_script`, `script_dir` and
`metrics` of an evaluator, `type`, `host` and `evaluator` of a pass. Olive also takes our keys inside `type_args`
(evaluator) or `config` (pass).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from olive_ext.config.evaluation import WorkflowSettings

SchemaKind = Literal["evaluator", "pass", "recipe"]
EVALUATOR_TYPE = "OrtLMEvaluator"
PASS_TYPE = "OrtLMEvaluation"
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
_PASS_KEYS: Json = {
    "type": {"const": PASS_TYPE, "description": "This package's pass: measures the model and hands it on unchanged."},
    "host": {"type": ["string", "object"], "description": "Olive system the pass runs on."},
    "evaluator": {"type": ["string", "object"], "description": "Olive evaluator of the pass's output model."},
}


def schema(kind: SchemaKind) -> Json:
    """The schema (draft 7, which editors know best) of one evaluator block, one pass block or a whole recipe."""
    if kind == "evaluator":
        return _block("OrtLMEvaluator block of an Olive recipe", _EVALUATOR_KEYS, "type_args")
    if kind == "pass":
        return _block("OrtLMEvaluation pass of an Olive recipe", _PASS_KEYS, "config")
    return _recipe()


def _document(title: str, body: Json, definitions: Json) -> Json:
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return {**head, **body, "$defs": definitions}


def _settings() -> tuple[Json, Json]:
    """The properties of the settings and the definitions they refer to, descriptions on one line each."""
    whole = _tidy(WorkflowSettings.model_json_schema())
    return whole["properties"], whole.get("$defs", {})


def _body(olive_keys: Json, nested_key: str) -> Json:
    """Our keys stand in the block itself or under `nested_key`, as Olive allows."""
    properties, _ = _settings()
    nested = {
        "type": "object",
        "description": "Another place for the keys of this block.",
        "additionalProperties": False,
        "properties": properties,
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["type"],
        "anyOf": [{"required": ["tasks"]}, {"required": [nested_key]}],
        "properties": {**olive_keys, nested_key: nested, **properties},
    }


def _block(title: str, olive_keys: Json, nested_key: str) -> Json:
    return _document(title, _body(olive_keys, nested_key), _settings()[1])


def _recipe() -> Json:
    """Checks our blocks wherever Olive takes an evaluator or a pass; all else is Olive's and left open."""
    evaluator = _when_ours(EVALUATOR_TYPE, "evaluator")
    ours = _when_ours(PASS_TYPE, "pass")
    pass_block = {**ours, "properties": {"evaluator": evaluator}}
    inline = {"evaluator": evaluator}
    body = {
        "type": "object",
        "required": ["input_model"],
        "properties": {
            "input_model": {"type": "object", "required": ["type"], "description": "The model Olive starts from."},
            "evaluators": {"type": "object", "additionalProperties": evaluator},
            "passes": {
                "type": "object",
                "additionalProperties": {
                    "if": {"type": "array"},
                    "then": {"items": pass_block},
                    "else": pass_block,
                },
            },
            "engine": {"type": "object", "properties": inline},
            **inline,
        },
    }
    definitions = {
        **_settings()[1],
        "evaluator": _body(_EVALUATOR_KEYS, "type_args"),
        "pass": _body(_PASS_KEYS, "config"),
    }
    return _document(f"Olive recipe with {EVALUATOR_TYPE} or {PASS_TYPE} blocks", body, definitions)


def _when_ours(type_name: str, definition: str) -> Json:
    return {
        "if": {"type": "object", "required": ["type"], "properties": {"type": {"const": type_name}}},
        "then": {"$ref": f"#/$defs/{definition}"},
    }


def _tidy(value: Any) -> Any:
    """Pydantic's schema in the words of draft 7, without the titles that repeat the key, descriptions on one line."""
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    tidy = {}
    for key, item in value.items():
        if isinstance(item, str):
            if key != "title":
                tidy[key] = " ".join(item.split()) if key == "description" else item
        else:
            tidy["items" if key == "prefixItems" else key] = _tidy(item)
    return tidy
