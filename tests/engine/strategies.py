"""Random requests for the engine, and how a result is held to the oracle's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Generation, Request, Result, ThinkingBudget
from olive_ext.media.items import MediaItem, MediaRun, Source
from olive_ext.model.spec.media_types import Modality
from tests.engine.fake_runner import VOCAB, oracle

TOKENS = st.integers(0, 3)
PLACEHOLDER = 9
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
            marker = tuple(draw(st.lists(TOKENS, min_size=1, max_size=3)))
            thinking = ThinkingBudget(draw(st.integers(0, 5)), marker) if draw(st.booleans()) else None
            most = draw(st.integers(1, 9))
            generation = Generation(most, stop_ids, is_finished=is_finished, thinking=thinking)
        requests.append(Request(tokens, num_targets, generation, draw(st.sampled_from(sources))))
    return requests


LARGEST = 9
"""Tokens of the largest of the items."""

ITEMS = [MediaItem(Modality.IMAGE, f"item {size}", size, PLACEHOLDER, dict) for size in (1, 4, LARGEST)]
PARTS = st.lists(st.one_of(st.sampled_from(ITEMS), st.lists(TOKENS, min_size=1, max_size=6)), min_size=1, max_size=5)


@st.composite
def requests_with_items(draw: st.DrawFn) -> list[Request]:
    """Texts with items at any place, of which some are beside each other, and last; prefixes are shared through them,
    and requests are asked twice."""
    stems = draw(st.lists(PARTS, min_size=1, max_size=3))
    requests: list[Request] = []
    for _ in range(draw(st.integers(1, 10))):
        if requests and draw(st.integers(0, 4)) == 0:
            requests.append(draw(st.sampled_from(requests)))
            continue
        tokens: list[int] = []
        media: list[MediaRun] = []
        for part in draw(st.sampled_from(stems)) + draw(st.one_of(st.just([]), PARTS)):
            if isinstance(part, MediaItem):
                media.append(MediaRun(len(tokens), part))
            tokens += [PLACEHOLDER] * part.num_tokens if isinstance(part, MediaItem) else part
        targets = draw(st.lists(TOKENS, max_size=5))
        generation = Generation(draw(st.integers(1, 5))) if not targets or draw(st.booleans()) else None
        requests.append(Request((*tokens, *targets), len(targets), generation, media=tuple(media)))
    return requests


def assert_equal(found: Result, expected: Result) -> None:
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert (found.is_greedy, found.tokens) == (expected.is_greedy, expected.tokens)
    assert (found.finish_reason, found.stop_id) == (expected.finish_reason, expected.stop_id)


def assert_runs_as_oracle(engine: Engine, calls: Iterable[Sequence[Request]], lengths: tuple[int, ...] = ()) -> None:
    """Each call's results are the oracle's."""
    for requests in calls:
        for found, request in zip(engine.run(requests), requests, strict=True):
            assert_equal(found, oracle(request, lengths))
