"""Whisper's suppressed tokens beside the table of agreement: samples, scores, bytes that reach the host, a checkpoint
on transformers, and Whisper's own `generate`, which adds languages and timestamps to that of the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import olive_ext
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest
from tests.agreement.asked import noises
from tests.agreement.packages import package as package_of
from tests.agreement.packages import suppressed
from tests.agreement.references import STOPS, load
from tests.exports import hf_model

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
FORMS: list[dict[str, Any]] = [
    {"num_slots": 1 + 4},
    {"num_slots": 16, "overlaps_steps": True},
    {"num_slots": 9, "graph": "untouched", "overlaps_steps": True},
]


@pytest.fixture(scope="module")
def package() -> Path:
    return package_of("whisper suppressing").path


@pytest.fixture(scope="module", params=FORMS, ids=str)
def session(package: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with olive_ext.open(package, engine=request.param) as session:
        session.stop_ids = frozenset(STOPS)
        yield session


def _request(source: Any, **search: Any) -> GenerationRequest:
    return GenerationRequest(source=source, max_new_tokens=NUM_TOKENS, **search)


def test_samples_hold_no_suppressed_token_and_are_others_than_with_them(session: Session) -> None:
    asked = [
        GenerationRequest(source=noises()[0], max_new_tokens=NUM_TOKENS, temperature=1.0, top_k=5, seed=seed)
        for seed in range(40)
    ]
    said = [output.tokens for output in session.generate(asked)]
    lists = suppressed()
    assert not {token for tokens in said for token in tokens} & set(lists["suppress_tokens"])
    assert not {tokens[0] for tokens in said if tokens} & set(lists["begin_suppress_tokens"])
    assert {token for tokens in said for token in tokens[1:]} & set(lists["begin_suppress_tokens"])


def test_nothing_of_a_row_but_its_best_token_comes_to_the_host(package: Path, session: Session) -> None:
    """Bytes of greedy answers are those of a model that suppresses nothing."""
    before = session.describe_execution()["counters"]["host_bytes"]
    session.generate([_request(noises()[0])])
    taken = session.describe_execution()["counters"]["host_bytes"] - before
    assert 0 < taken <= 64 * NUM_TOKENS


def test_whispers_own_generate_gives_the_same_text_with_four_beams(package: Path) -> None:
    """With the stop id and the settings that its configuration names."""
    model = load(hf_model("whisper"))
    model.generation_config.update(**suppressed())
    given = torch.tensor(np.stack(noises()))
    with torch.inference_mode():
        found = model.generate(given, num_beams=4, max_new_tokens=NUM_TOKENS).tolist()
    with olive_ext.open(package) as opened:
        outputs = opened.generate([_request(one, num_beams=4) for one in noises()])
        ends = opened.stop_ids | {model.config.pad_token_id, model.config.decoder_start_token_id}
    for row, output in zip(found, outputs, strict=True):
        assert tuple(token for token in row if token not in ends) == output.tokens
