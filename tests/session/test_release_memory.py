"""A session that frees its memory keeps its weights: the same answers behind it, and no room in between."""

from __future__ import annotations

from pathlib import Path

import pytest

import olive_ext
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.check.tiny import put_model
from tests.exports import genai_export

REQUESTS = [ScoringRequest([5, 6, number], [7, 8]) for number in range(9, 40)]
PROMPTS = [GenerationRequest([5, number], max_new_tokens=70) for number in range(9, 14)]


def check_release(model: Path) -> None:
    with olive_ext.open(model, engine={"num_slots": 3}, max_length=256) as session:
        scores, texts = session.loglikelihood(REQUESTS), session.generate(PROMPTS)
        assert session.describe_execution()["capacity"] > 0
        session.release_memory()
        assert session.describe_execution()["capacity"] == 0
        assert [output.tokens for output in session.generate(PROMPTS)] == [output.tokens for output in texts]
        again = session.loglikelihood(REQUESTS)
        expected = pytest.approx([output.logprob for output in scores], abs=1e-5)
        assert [output.logprob for output in again] == expected


def test_returned_cache_is_released(tmp_path: Path) -> None:
    check_release(put_model(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_cache_in_place_is_released(family: str) -> None:
    check_release(genai_export(family))
