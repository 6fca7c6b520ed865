"""Requests refuse wrong values by name."""

from __future__ import annotations

import numpy as np
import pytest

from olive_ext.errors import ConfigError
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": None}, r"'prompt' = None: text, a list of chat messages, or a list of token ids"),
        ({"prompt": []}, r"'prompt' is an empty list"),
        ({"prompt": {"role": "user"}}, r"'prompt' = \{'role': 'user'\}"),
        ({"prompt": [{"content": "x"}]}, r"a chat message has a 'role'"),
        ({"prompt": [{"role": "user", "content": "x"}, "y"]}, r"'prompt' holds 'y'"),
        ({"prompt": ["a", "b"]}, r"'prompt': text or a list of token ids"),
        ({"prompt": b"ab"}, r"'prompt': text or a list of token ids, not b'ab'"),
        ({"prompt": [1, -2]}, r"'prompt' holds -2"),
        ({"prompt": "ab\ud800"}, r"'prompt' has half of a surrogate pair at character 2"),
        ({"prompt": [{"role": "a", "content": "é\udfff"}]}, r"'prompt\[0\]\[content\]' has .* at character 1"),
        ({"prompt": [{"role": "a", "content": [{"text": "\ud800"}]}]}, r"'prompt\[0\]\[content\]\[0\]\[text\]' has"),
        ({"source": "\ud800"}, r"'source' has .* at character 0"),
        ({"stop": ["a", "\ud800"]}, r"'stop' has .* at character 0"),
        ({"chat_template_kwargs": {"x": ["\ud800"]}}, r"'chat_template_kwargs\[x\]\[0\]' has"),
        ({"max_new_tokens": 0}, r"'max_new_tokens' = 0: a whole number of at least 1"),
        ({"max_new_tokens": True}, r"'max_new_tokens' = True"),
        ({"max_new_tokens": 2.5}, r"'max_new_tokens' = 2.5"),
        ({"stop": ["a", ""]}, r"'stop' holds ''"),
        ({"stop": [5]}, r"'stop' holds 5"),
        ({"stop": None}, r"'stop' = None"),
        ({"temperature": -0.1}, r"'temperature' = -0.1"),
        ({"temperature": float("nan")}, r"'temperature' = nan"),
        ({"temperature": float("inf")}, r"'temperature' = inf"),
        ({"temperature": None}, r"'temperature' = None"),
        ({"top_p": 0}, r"'top_p' = 0"),
        ({"top_p": 1.1}, r"'top_p' = 1.1"),
        ({"top_k": -1}, r"'top_k' = -1: .* \(0 turns it off\)"),
        ({"seed": -1}, r"'seed' = -1"),
        ({"num_beams": 0}, r"'num_beams' = 0: a whole number of at least 1"),
        ({"num_return_sequences": 2}, r"'num_return_sequences' = 2: at most 'num_beams', which is 1"),
        ({"num_beams": 2, "length_penalty": float("nan")}, r"'length_penalty' = nan"),
        ({"num_beams": 2, "early_stopping": 1}, r"'early_stopping' = 1: true, false or \"never\""),
        ({"num_beams": 2, "temperature": 0.5}, r"'num_beams' = 2 with 'temperature' = 0.5: beams are not drawn"),
    ],
)
def test_generation_request_refuses_a_wrong_value_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationRequest(**{"prompt": "x", **values})  # type: ignore[arg-type]


def test_generation_request_takes_one_stop_as_text_and_ids_of_any_integer_kind() -> None:
    request = GenerationRequest(np.array([3, 4]), stop="\n")  # type: ignore[arg-type]
    assert request.prompt == (3, 4)
    assert request.stop == ("\n",)


def test_scoring_and_rolling_requests_refuse_a_wrong_value_by_name() -> None:
    with pytest.raises(ConfigError, match="'target' is empty"):
        ScoringRequest("x", "")
    with pytest.raises(ConfigError, match="'context' = None: text, a list of chat messages"):
        ScoringRequest(None, "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'target': text or a list of token ids, not \['a'\]"):
        ScoringRequest("x", ["a"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="'prefix' = -1"):
        RollingRequest("x", prefix=-1)
    for wrong in (lambda: ScoringRequest("x", "a\ud800"), lambda: ScoringRequest("a\ud800", "x")):
        with pytest.raises(ConfigError, match="half of a surrogate pair at character 1"):
            wrong()
    with pytest.raises(ConfigError, match=r"'text' has .* at character 0"):
        RollingRequest("\ud800")
