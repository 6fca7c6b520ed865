"""The schemas say the same as the configuration models."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from olive_ext.config import SCHEMA_KINDS, EvaluationSettings, schema

EVALUATOR = {
    "type": "OrtLMEvaluator",
    "user_script": "plugin.py",
    "tasks": ["arc_easy", {"task": "mine"}],
    "limit": 0.5,
    "execution_provider": ["webgpu", ["cpu", {"threads": 2}]],
    "engine": {"num_slots": 4},
    "metrics": [{"name": "arc_easy", "type": "accuracy"}],
}
RECIPE: dict[str, Any] = {
    "input_model": {"type": "HfModel", "model_path": "model"},
    "systems": {"local_system": {"type": "LocalSystem"}},
    "evaluators": {"ours": EVALUATOR, "theirs": {"type": "LMEvaluator", "tasks": ["x"], "whatever": 1}},
    "passes": {
        "builder": {"type": "ModelBuilder", "precision": "int4"},
        "measure": {"type": "OrtLMEvaluation", "tasks": ["arc_easy"], "batch_size": "auto"},
        "again": [{"type": "OrtLMEvaluation", "config": {"tasks": ["arc_easy"]}}],
    },
    "evaluator": "ours",
    "output_dir": "outputs",
}


def problems(document: Any, kind: Any = "recipe") -> list[str]:
    validator = jsonschema.Draft7Validator(schema(kind))
    return [error.message for error in validator.iter_errors(document)]


@pytest.mark.parametrize("kind", SCHEMA_KINDS)
def test_schema_is_valid_itself_and_takes_no_unknown_type(kind: Any) -> None:
    made = schema(kind)
    jsonschema.Draft7Validator.check_schema(made)
    with pytest.raises(jsonschema.SchemaError):
        jsonschema.Draft7Validator.check_schema({**made, "type": "mapping"})


def test_recipe_with_our_blocks_passes_and_blocks_of_others_are_left_open() -> None:
    assert problems(RECIPE) == []
    document = copy.deepcopy(RECIPE)
    document["evaluators"]["theirs"]["batch_size"] = "foo"
    document["passes"]["builder"]["anything"] = 1
    document["search_strategy"] = False
    assert problems(document) == []


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("evaluators", "ours"), "tassks", ["a"]),
        (("evaluators", "ours"), "batch_size", "foo"),
        (("evaluators", "ours"), "certain", {"confidence": 2}),
        (("evaluators", "ours", "engine"), "chunksize", 8),
        (("passes", "measure"), "limt", 3),
        (("passes", "again", 0, "config"), "limt", 3),
        ((), "evaluator", {"type": "OrtLMEvaluator", "tasks": ["a"], "limt": 3}),
        ((), "engine", {"evaluator": {"type": "OrtLMEvaluator"}}),
        (("passes", "builder"), "evaluator", {"type": "OrtLMEvaluator", "tasks": []}),
    ],
)
def test_wrong_key_or_value_in_our_blocks_fails(path: tuple[Any, ...], key: str, value: Any) -> None:
    document = copy.deepcopy(RECIPE)
    block: Any = document
    for part in path:
        block = block[part]
    block[key] = value
    assert problems(document)


def test_evaluator_needs_tasks_here_or_in_type_args() -> None:
    assert problems({"type": "OrtLMEvaluator"}, "evaluator")
    assert problems({"type": "OrtLMEvaluator", "type_args": {"tasks": ["a"]}}, "evaluator") == []


@pytest.mark.parametrize("kind", ["evaluator", "pass"])
def test_schema_has_every_setting_with_its_description(kind: Any) -> None:
    properties = schema(kind)["properties"]
    for name, field in EvaluationSettings.model_fields.items():
        assert properties[name]["description"] == " ".join((field.description or "").split())
