"""A claim in a recipe: taken from `require`, handed on to the evaluation, and a part of the key of Olive's caches."""

from __future__ import annotations

from typing import Any

from olive_ext.config import Certain, EvaluationConfig, EvaluationSettings
from olive_ext.workflow.evaluation_cache import deciding
from olive_ext.workflow.handlers import written

BOUND = {"metric": "accuracy_difference", "min": -0.02}


def settings(**values: Any) -> dict[str, Any]:
    return {"tasks": ["a"], "reference": "float", "documents": "enough", "require": [BOUND], **values}


def test_evaluation_is_asked_for_what_the_recipe_requires() -> None:
    given = written(EvaluationSettings.parse(settings()))
    config = EvaluationConfig.parse({**given, "model": {"path": "m"}})
    assert config.claim == Certain(above=-0.02)


def test_bounds_decide_numbers_where_they_are_the_claim() -> None:
    assert "require" in deciding(settings())
    assert "require" not in deciding(settings(documents="all"))
    assert deciding(settings()) != deciding(settings(require=[{**BOUND, "min": -0.01}]))
