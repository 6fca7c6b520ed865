"""Random requests for the engine, and how a result is held to the oracle's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Generation, Request, Result, Source
from tests.engine.fake_runner import VOCAB, oracle

TOKENS = st.integers(0, 3)
SOURCES = [None, *(Source(np.array([number, 5, 9])) for number in range(3))]
STEMS = st.lists(st.lists(TOKENS, min_size=1, max_size=30), min_size=1, max_size=4)


@st.composite
def requests_of(draw: st.DrawFn, max_sources: int = len(SOURCES)) -> list[Request]:
    stems = draw(STEMS)
    sources = SOURCES[: draw(st.integers(1, max_sources))]
    requests = []
    for _ in range(draw(st.integers(0, 12))):
        tokens = tuple(draw(st.sampled_from(stems)) + draw(st.lists(TOKENS, max_size=8)))
        num_targets = draw(st.integers(0, len(tokens) - 1))
        generation = None
        if num_targets == 0 or draw(st.booleans()):
            stop_ids = frozenset(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)))
            limit = draw(st.integers(1, 9))
            is_finished = (lambda tokens, limit=limit: len(tokens) >= limit) if draw(st.booleans()) else None
            generation = Generation(draw(st.integers(1, 9)), stop_ids, is_finished=is_finished)
        requests.append(Request(tokens, num_targets, generation, draw(st.sampled_from(sources))))
    return requests


def assert_equal(found: Result, expected: Result) -> None:
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert (found.is_greedy, found.tokens) == (expected.is_greedy, expected.tokens)
    assert (found.finish_reason, found.stop_id) == (expected.finish_reason, expected.stop_id)


def assert_runs_as_oracle(engine: Engine, calls: Iterable[Sequence[Request]]) -> None:
    """Each call's results are the oracle's."""
    for requests in calls:
        for found, request in zip(engine.run(requests), requests, strict=True):
            assert_equal(found, oracle(request))
