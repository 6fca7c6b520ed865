"""Requests refuse wrong values by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from olive_ext.errors import ConfigError
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest
from tests.refusals import refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": None}, {"code": "wrong_value", "field": "prompt"}),
        ({"prompt": []}, {"code": "wrong_value", "field": "prompt"}),
        ({"prompt": {"role": "user"}}, {"code": "wrong_value", "field": "prompt", "value": {"role": "user"}}),
        ({"prompt": [{"content": "x"}]}, {"code": "wrong_value", "field": "prompt", "holds": "role"}),
        ({"prompt": [{"role": "user", "content": "x"}, "y"]}, {"code": "wrong_value", "field": "prompt"}),
        ({"prompt": ["a", "b"]}, {"code": "wrong_value", "field": "prompt"}),
        ({"prompt": b"ab"}, {"code": "wrong_value", "field": "prompt", "holds": "ab"}),
        ({"prompt": [1, -2]}, {"code": "wrong_value", "field": "prompt", "holds": "-2"}),
        ({"prompt": "ab\ud800"}, {"code": "wrong_value", "field": "prompt", "holds": "2"}),
        (
            {"prompt": [{"role": "a", "content": "é\udfff"}]},
            {"code": "wrong_value", "field": "prompt[0][content]", "holds": "1"},
        ),
        (
            {"prompt": [{"role": "a", "content": [{"text": "\ud800"}]}]},
            {"code": "wrong_value", "field": "prompt[0][content][0][text]"},
        ),
        ({"source": "\ud800"}, {"code": "wrong_value", "field": "source", "holds": "0"}),
        ({"stop": ["a", "\ud800"]}, {"code": "wrong_value", "field": "stop", "holds": "0"}),
        ({"chat_template_kwargs": {"x": ["\ud800"]}}, {"code": "wrong_value", "field": "chat_template_kwargs[x][0]"}),
        ({"max_new_tokens": 0}, {"code": "wrong_value", "field": "max_new_tokens", "value": 0, "holds": "1"}),
        ({"max_new_tokens": True}, {"code": "wrong_value", "field": "max_new_tokens", "value": True}),
        ({"max_new_tokens": 2.5}, {"code": "wrong_value", "field": "max_new_tokens", "value": 2.5}),
        ({"stop": ["a", ""]}, {"code": "wrong_value", "field": "stop"}),
        ({"stop": [5]}, {"code": "wrong_value", "field": "stop", "holds": "5"}),
        ({"stop": None}, {"code": "wrong_value", "field": "stop"}),
        ({"temperature": -0.1}, {"code": "wrong_value", "field": "temperature", "value": -0.1}),
        ({"temperature": float("nan")}, {"code": "wrong_value", "field": "temperature"}),
        ({"temperature": float("inf")}, {"code": "wrong_value", "field": "temperature"}),
        ({"temperature": None}, {"code": "wrong_value", "field": "temperature"}),
        ({"top_p": 0}, {"code": "wrong_value", "field": "top_p", "value": 0}),
        ({"top_p": 1.1}, {"code": "wrong_value", "field": "top_p", "value": 1.1}),
        ({"top_k": -1}, {"code": "wrong_value", "field": "top_k", "value": -1, "holds": "0"}),
        ({"seed": -1}, {"code": "wrong_value", "field": "seed", "value": -1}),
        ({"num_beams": 0}, {"code": "wrong_value", "field": "num_beams", "value": 0, "holds": "1"}),
        (
            {"num_return_sequences": 2},
            {"code": "wrong_value", "field": "num_return_sequences", "value": 2, "holds": ("num_beams", "1")},
        ),
        ({"num_beams": 2, "length_penalty": float("nan")}, {"code": "wrong_value", "field": "length_penalty"}),
        ({"num_beams": 2, "early_stopping": 1}, {"code": "wrong_value", "field": "early_stopping", "value": 1}),
        (
            {"num_beams": 2, "temperature": 0.5},
            {"code": "contradiction", "field": "num_beams", "value": 2, "holds": ("temperature", "0", "5")},
        ),
    ],
)
def test_generation_request_refuses_a_wrong_value_by_name(values: dict[str, object], message: dict[str, Any]) -> None:
    with refused(ConfigError, **message):
        GenerationRequest(**{"prompt": "x", **values})  # type: ignore[arg-type]


def test_generation_request_takes_one_stop_as_text_and_ids_of_any_integer_kind() -> None:
    request = GenerationRequest(np.array([3, 4]), stop="\n")  # type: ignore[arg-type]
    assert request.prompt == (3, 4)
    assert request.stop == ("\n",)


def test_scoring_and_rolling_requests_refuse_a_wrong_value_by_name() -> None:
    with refused(ConfigError, "wrong_value", "target"):
        ScoringRequest("x", "")
    with refused(ConfigError, "wrong_value", "context"):
        ScoringRequest(None, "x")  # type: ignore[arg-type]
    with refused(ConfigError, "wrong_value", "target"):
        ScoringRequest("x", ["a"])  # type: ignore[list-item]
    with refused(ConfigError, "wrong_value", "prefix", -1):
        RollingRequest("x", prefix=-1)
    for wrong in (lambda: ScoringRequest("x", "a\ud800"), lambda: ScoringRequest("a\ud800", "x")):
        with pytest.raises(ConfigError, match="half of a surrogate pair at character 1"):
            wrong()
    with refused(ConfigError, "wrong_value", "text", holds="0"):
        RollingRequest("\ud800")
