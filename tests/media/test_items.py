"""What is kept within a budget of bytes, against a list of what was used.

Items are fed whole, whatever cuts steps: chunks, budgets, forks, padding, memory that runs out. The fake runner
fails on a step that cuts one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.buckets import BucketedRunner, step_sizes
from olive_ext.engine.requests import Lost, Request
from olive_ext.errors import LostRequestsError, MediaError, MemoryShortageError
from olive_ext.media.items import ItemLimit, ItemStore, MediaItem, MediaRun
from tests.engine.fake_runner import RANGE, FakeRunner, oracle
from tests.engine.strategies import (
    ITEMS,
    LARGEST,
    PLACEHOLDER,
    RUNNERS,
    assert_equal,
    assert_runs_as_oracle,
    requests_with_items,
)
from tests.refusals import refused

BUDGET = 20


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 25), st.booleans())))
def test_values_used_last_are_kept_within_the_budget(calls: list[tuple[int, int, bool]]) -> None:
    kept: ItemStore[bytes] = ItemStore(BUDGET, len)
    used: list[tuple[str, bytes]] = []
    for number, size, is_put in calls:
        key, value = str(number), bytes(size)
        known = dict(used)
        if is_put:
            others = [pair for pair in used if pair[0] != key]
            used = [*others, (key, value)]
            while len(used) > 1 and sum(len(held) for _, held in used) > BUDGET:
                del used[0]
            assert kept.put(key, value) == len(others) + 1 - len(used)
        else:
            assert kept.get(key) == known.get(key)
            used = [pair for pair in used if pair[0] != key] + [pair for pair in used if pair[0] == key]
        assert kept.num_bytes == sum(len(held) for _, held in used)
        assert [name in kept for name in map(str, range(8))] == [name in dict(used) for name in map(str, range(8))]
    kept.clear()
    assert kept.num_bytes == 0
    assert kept.get("0") is None


SIDED = ("sides", "trees on sides")
"""Items have no side of a length in the oracle."""

GROUPED = ("one row", "slots", "short answers", "packed", "alike")
"""Runners that may feed groups of rows."""


@pytest.mark.parametrize("kind", [*(kind for kind in RUNNERS if kind not in SIDED), "padded"])
@settings(max_examples=settings().max_examples // 3)
@given(
    data=st.data(),
    calls=st.lists(requests_with_items(), min_size=1, max_size=3),
    chunk_size=st.integers(1, 20),
    row_group=st.sampled_from([1, 2, 4]),
    is_stream=st.booleans(),
    bad=st.sampled_from([None, *ITEMS]),
)
def test_items_are_fed_whole_and_one_that_its_encoder_fails_on_loses_its_requests_alone(
    kind: str,
    data: st.DataObject,
    calls: list[list[Request]],
    chunk_size: int,
    row_group: int,
    is_stream: bool,
    bad: MediaItem | None,
) -> None:
    """Padding stands for no item behind it; steps without memory are halved at borders."""
    runner = data.draw(RUNNERS["slots" if kind == "padded" else kind].filter(lambda runner: not runner.traits.lengths))
    runner.bad, runner.most_tokens = bad.key if bad else "", max(runner.most_tokens, LARGEST)
    groups = row_group if kind in GROUPED and runner.traits.can_rewind else 1
    runner.traits = replace(runner.traits, row_group=groups)
    inner = BucketedRunner(runner, step_sizes(chunk_size)) if kind == "padded" else runner
    engine, num_requests = Engine(inner, chunk_size), 0
    for requests in calls:
        items = list(enumerate(requests))
        found = dict(engine.run_continuous(items) if is_stream else engine.run_slices([items]))
        has_it = {place for place, one in enumerate(requests) if bad in [run.item for run in one.media]}
        num_requests += len(requests)
        assert found.keys() == set(range(len(requests)))
        for place, result in found.items():
            if place in has_it:
                assert result == Lost("planted")
            else:
                assert_equal(result, oracle(requests[place]))
    assert engine.counters.requests == num_requests
    assert runner.num_lost <= len(calls), "its other requests are lost with the first"
    if has_it:
        with pytest.raises(LostRequestsError) as caught:
            engine.run(requests)
        assert caught.value.lost == dict.fromkeys(has_it, "planted")
    most = max(chunk_size, LARGEST) + groups - 1  # a group is filled up
    for step in runner.steps if kind not in ("padded", "whole texts") else ():
        prompts = sum(len(row.tokens) for row in step.rows if len(row.tokens) > 1)
        assert prompts <= most * (len(step.rows) if kind == "alike" else 1)


def _scored(*parts: MediaItem | int) -> Request:
    """A text of tokens and items whose last token is scored."""
    tokens: list[int] = []
    media: list[MediaRun] = []
    for part in parts:
        media += [MediaRun(len(tokens), part)] if isinstance(part, MediaItem) else []
        tokens += [PLACEHOLDER] * part.num_tokens if isinstance(part, MediaItem) else [part]
    return Request(tuple(tokens), 1, media=tuple(media))


@pytest.mark.parametrize(
    ("requests", "num_slots", "row_group"),
    [
        ([Request((first, last), 1) for first in (0, 1) for last in (0, 1)], 2, 2),
        ([_scored(ITEMS[0], 3, *end) for end in ((1, 3, 1), (1, 0, 0), (ITEMS[1], 1, 3), (ITEMS[0], 3, 1))], 4, 1),
    ],
    ids=["groups of rows", "an item of its own after one that is shared"],
)
def test_short_answers_equal_the_oracle(requests: list[Request], num_slots: int, row_group: int) -> None:
    runner = FakeRunner(num_slots, RANGE, answer_steps=True)
    runner.traits = replace(runner.traits, row_group=row_group)
    assert_runs_as_oracle(Engine(runner, 1), [requests])


def test_item_for_which_memory_does_not_suffice_alone_is_told() -> None:
    runner = FakeRunner(3, RANGE, most_tokens=LARGEST - 1)
    request = Request((1, *(PLACEHOLDER,) * LARGEST, 2), 1, media=(MediaRun(1, ITEMS[-1]),))
    with refused(MemoryShortageError, "out_of_memory", holds="9"):
        Engine(runner, 64).run([request])


def test_item_of_more_tokens_than_a_step_may_have_is_refused_by_name() -> None:
    runner = FakeRunner(2, RANGE)
    runner.traits = replace(runner.traits, item_limit=ItemLimit(LARGEST - 1, "'engine.chunk_size' = 8 allows fewer"))
    request = Request((1, *(PLACEHOLDER,) * LARGEST, 2), 1, media=(MediaRun(1, ITEMS[-1]),))
    with refused(MediaError, "media", holds=("engine.chunk_size", "9", "8")):
        Engine(runner, 8).run([request])
