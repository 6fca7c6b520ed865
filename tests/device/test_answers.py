"""Short answers that share steps on a device without paged attention for the model's caches (WebGPU in fp32)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from olive_ext.session import Session
from tests.device.open import open_on
from tests.exports import VOCAB, genai_export

pytestmark = [pytest.mark.webgpu, pytest.mark.slow]

QUESTIONS, ANSWERS, TOKENS, SLOTS = 5, 7, 4, 8


def _pairs() -> list[tuple[list[int], list[int]]]:
    """Questions behind one stem, each with answers of four tokens."""
    rng = random.Random(3)
    words = lambda count: [rng.randrange(4, VOCAB) for _ in range(count)]  # noqa: E731
    stem = words(40)
    contexts = [stem + words(rng.randrange(8, 24)) for _ in range(QUESTIONS)]
    return [(context, [4 + number, *words(TOKENS - 1)]) for context in contexts for number in range(ANSWERS)]


def _scores(session: Session) -> tuple[np.ndarray, list[bool]]:
    outputs = session.loglikelihood(_pairs())
    return np.array([x for output in outputs for x in output.token_logprobs]), [one.is_greedy for one in outputs]


def _run(device: str, family: str, **engine: Any) -> tuple[np.ndarray, list[bool], dict[str, Any]]:
    with open_on(device, genai_export(family), num_slots=SLOTS, **engine) as session:
        return *_scores(session), session.describe_execution()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_answers_that_share_steps_score_what_rows_and_the_cpu_score(family: str) -> None:
    cpu, greedy, _ = _run("cpu", family)
    rows, by_rows, row_facts = _run("webgpu", family, scoring="rows")
    found, by_answers, facts = _run("webgpu", family, scoring="answers")
    assert (row_facts["scoring"], facts["scoring"]) == ("rows", "answers"), facts["notes"]
    assert np.abs(found - cpu).max() < 1e-4
    assert np.abs(found - rows).max() < 1e-4
    assert greedy == by_rows == by_answers
    fewest = row_facts["counters"]["steps"] - QUESTIONS * (ANSWERS - 1)
    assert facts["counters"]["steps"] <= fewest + 1.5 * QUESTIONS * (ANSWERS - 1) * (TOKENS - 1) / SLOTS
    assert facts["counters"]["tokens_fed"] <= 1.02 * facts["counters"]["tokens_distinct"]
    assert facts["counters"]["copies"] > 0


def test_short_answers_share_steps_by_rule() -> None:
    with open_on("webgpu", genai_export("llama"), num_slots=SLOTS) as session:
        _scores(session)
        facts = session.describe_execution()
    assert facts["scoring"] == "answers"
    assert facts["scoring_reason"].startswith("by rule: ")
