"""Random requests for the engine, and how a result is held to the oracle's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.packed import PackedSteps
from olive_ext.engine.forms.returned import AlikeRows
from olive_ext.engine.requests import Counters, Generation, Request, Result, ThinkingBudget
from olive_ext.engine.scheduling.blocks import BlockTables
from olive_ext.media.items import MediaItem, MediaRun, Source
from olive_ext.model.types import Modality
from tests.engine.fake_runner import ALIKE, FORMS, PACKED, POOL, RANGE, SINGLE, VOCAB, FakeRunner, oracle

TOKENS = st.integers(0, 3)
PLACEHOLDER = 9
SOURCES = [None, *(Source(np.array([number, 5, 9])) for number in range(3))]


def texts(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """Lists of `TOKENS`, each of one draw: lists of draws take most of a test's time."""
    return st.binary(min_size=least, max_size=most).map(lambda drawn: [byte % 4 for byte in drawn])


STEMS = st.lists(texts(1, 30), min_size=1, max_size=4)


@st.composite
def requests_of(draw: st.DrawFn, max_sources: int = len(SOURCES)) -> list[Request]:
    stems, sources = draw(STEMS), SOURCES[: draw(st.integers(1, max_sources))]
    return [_request(stems, sources, *draw(_REQUEST)) for _ in range(draw(st.integers(0, 12)))]


_REQUEST = st.tuples(st.binary(min_size=10, max_size=10), texts(0, 8), texts(1, 3))


def _request(
    stems: Sequence[list[int]], sources: Sequence[Source | None], drawn: bytes, end: list[int], marker: list[int]
) -> Request:
    """One after a stem: scored, answered or both, with what ends an answer."""
    stem, targets, answers, stops, first, limit, is_limited, thought, thinks, most = drawn
    tokens = (*stems[stem % len(stems)], *end)
    num_targets = targets % len(tokens)
    generation = None
    if num_targets == 0 or answers % 2:
        stop_ids = frozenset((first + 3 * number) % VOCAB for number in range(stops % 4))
        finished = 1 + limit % 9
        is_finished = (lambda tokens: len(tokens) >= finished) if is_limited % 2 else None
        thinking = ThinkingBudget(thought % 6, tuple(marker)) if thinks % 2 else None
        generation = Generation(1 + most % 9, stop_ids, is_finished=is_finished, thinking=thinking)
    return Request(tokens, num_targets, generation, sources[(stem // 16 + targets // 16) % len(sources)])


def questions(count: int, answers: int, tokens: int = 3, prefix: int = 30, own: int = 20) -> list[Request]:
    """Each question has several answers, all behind one prefix."""
    rng = random.Random(0)
    words = lambda n: tuple(rng.randrange(VOCAB) for _ in range(n))  # noqa: E731
    shared = words(prefix)
    contexts = [shared + words(own) for _ in range(count)]
    return [Request((*context, first, *words(tokens - 1)), tokens) for context in contexts for first in range(answers)]


LARGEST = 9
"""Tokens of the largest of the items."""

ITEMS = [MediaItem(Modality.IMAGE, f"item {size}", size, PLACEHOLDER, dict) for size in (1, 4, LARGEST)]
PARTS = st.lists(st.one_of(st.sampled_from(ITEMS), texts(1, 6)), min_size=1, max_size=5)


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
        targets = draw(texts(0, 5))
        generation = Generation(draw(st.integers(1, 5))) if not targets or draw(st.booleans()) else None
        requests.append(Request((*tokens, *targets), len(targets), generation, media=tuple(media)))
    return requests


ANY = st.booleans()
LENGTHS = st.lists(st.integers(1, 35), min_size=1, max_size=2, unique=True).map(sorted).map(tuple)
MIXES = st.builds(AlikeRows, ANY, ANY, ANY, ANY)
MIXED = st.just(AlikeRows(mixes_pasts=True, prompts=True, continued=True))
_fake = partial(st.builds, FakeRunner, st.integers(1, 8), overlaps_steps=ANY)

RUNNERS: dict[str, st.SearchStrategy[FakeRunner]] = {
    "one row": _fake(form=st.just(SINGLE), can_rewind=ANY),
    "whole texts": _fake(form=st.just(SINGLE), chunked_prefill=st.just(False), lengths=st.one_of(st.just(()), LENGTHS)),
    "slots": _fake(form=st.sampled_from([RANGE, POOL])),
    "short answers": _fake(form=st.sampled_from([RANGE, POOL]), answer_steps=st.just(True)),
    "packed": _fake(form=st.one_of(st.just(PACKED), st.builds(PackedSteps, st.integers(1, 60)))),
    "few blocks": _fake(form=st.just(PACKED), most_blocks=st.integers(1, 30)),
    "alike": _fake(form=st.just(ALIKE), row_mix=MIXES, can_rewind=ANY),
    "trees": _fake(form=st.sampled_from(FORMS), has_tree_batches=st.just(True)),
    "few positions": _fake(form=st.sampled_from([RANGE, ALIKE]), most_positions=st.integers(1, 300)),
    "little memory": _fake(form=st.sampled_from([SINGLE, RANGE, PACKED]), has_tree_batches=ANY, most_tokens=st.just(3)),
    "sides": _fake(form=st.sampled_from(FORMS), lengths=LENGTHS, row_mix=MIXED),
    "trees on sides": _fake(form=st.just(RANGE), lengths=LENGTHS, has_tree_batches=st.just(True)),
}
"""Runners of every form, and of little memory of every kind."""

WITHOUT_SOURCES = ("short answers", "trees", "little memory", "trees on sides")


def assert_equal(found: Result, expected: Result) -> None:
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert (found.is_greedy, found.tokens) == (expected.is_greedy, expected.tokens)
    assert (found.finish_reason, found.stop_id) == (expected.finish_reason, expected.stop_id)


def assert_runs_as_oracle(engine: Engine, calls: Iterable[Sequence[Request]], lengths: tuple[int, ...] = ()) -> None:
    """Each call's results are the oracle's, and no request is begun twice."""
    for requests in calls:
        begun = engine.counters.requests
        for found, request in zip(engine.run(requests), requests, strict=True):
            assert_equal(found, oracle(request, lengths))
        assert engine.counters.requests == begun + len(requests)


def ran(runner: FakeRunner, requests: Sequence[Request], chunk_size: int = 64) -> Counters:
    """What an engine has counted that ran these requests, whose results are the oracle's, and was closed."""
    engine = Engine(runner, chunk_size)
    assert_runs_as_oracle(engine, [requests])
    engine.close()
    return engine.counters


def assert_tables_agree(engine: Engine, runner: FakeRunner) -> None:
    """What the scheduler of an engine that has run counts is what the runner holds."""
    kept = engine._scoring.scheduler._in_slots.slots._tables
    if kept is not None:
        slots = range(runner.capacity.num_slots)
        assert _as_shared(kept, slots) == _as_shared(runner.tables, slots)
        assert kept.num_free == runner.tables.num_free


def _as_shared(tables: BlockTables, slots: range) -> list[list[int]]:
    """The tables with blocks numbered as they come: which block is free first, only its holder knows."""
    names: dict[int, int] = {}
    return [[names.setdefault(block, len(names)) for block in tables.table(slot)] for slot in slots]
