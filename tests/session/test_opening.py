"""`olive_ext.open` takes every setting of opening a model, by one road."""

import inspect
from typing import Any

import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError
from olive_ext.session.opening import OpenKeywords
from tests.exports.genai import genai_export


def test_keywords_are_the_fields_of_model_settings() -> None:
    own = {name for name, one in inspect.signature(olive_ext.open).parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert own - {"reference", "record_to"} | OpenKeywords.__annotations__.keys() == (
        ModelSettings.model_fields.keys() - {"model"}
    )
    assert not own & OpenKeywords.__annotations__.keys()


def test_settings_open_the_model_that_their_fields_open() -> None:
    model = genai_export("llama")
    engine = {"num_slots": 2, "scoring": "rows"}
    facts = []
    for opened in (
        olive_ext.open(model, engine=engine, add_bos_token=False),
        olive_ext.open(ModelSettings.of({"model": model, "engine": engine, "add_bos_token": False})),
    ):
        with opened as session:
            assert session.model is not None
            facts.append((session.model.settings, session.describe_execution()["num_slots"]))
    assert facts[0] == facts[1]


def test_settings_are_given_once() -> None:
    with pytest.raises(ConfigError, match="'max_length' was given beside a ModelSettings"):
        olive_ext.open(ModelSettings.of({"model": "x"}), max_length=8)


def test_misspelt_keyword_is_named_with_the_nearest_known() -> None:
    given: dict[str, Any] = {"batchsize": 3}
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize': did you mean 'batch_size'"):
        olive_ext.open("x", **given)


def test_wrong_value_is_told_with_what_is_accepted() -> None:
    with pytest.raises(ConfigError, match="'max_length' = 0: give a positive integer"):
        olive_ext.open("x", max_length=0)
