"""Packed steps over the fake runner, whose slots are made of blocks: results, the tokens fed, the blocks copied."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.base import MIN_COPY
from olive_ext.engine.requests import Generation, Request
from tests.engine.fake_runner import BLOCK_SIZE, PACKED, VOCAB, FakeRunner
from tests.engine.strategies import assert_runs_as_oracle, requests_of

PREFIX = 30


def _questions(count: int, answers: int, seed: int = 0) -> list[Request]:
    """Each question has several answers of three tokens, all behind one prefix."""
    rng = random.Random(seed)
    words = lambda n: tuple(rng.randrange(VOCAB) for _ in range(n))  # noqa: E731
    prefix = words(PREFIX)
    contexts = [prefix + words(20) for _ in range(count)]
    return [Request(context + words(3), 3) for context in contexts for _ in range(answers)]


@given(
    calls=st.lists(requests_of(), min_size=1, max_size=4),
    num_slots=st.integers(1, 6),
    chunk_size=st.integers(1, 60),
    overlaps_steps=st.booleans(),
)
def test_blocks_equal_oracle_under_pressure_of_few_slots(
    calls: list[list[Request]], num_slots: int, chunk_size: int, overlaps_steps: bool
) -> None:
    runner = FakeRunner(num_slots, PACKED, overlaps_steps=overlaps_steps)
    engine = Engine(runner, chunk_size)
    assert_runs_as_oracle(engine, calls)
    inputs = [sum(len(row.tokens) for row in step.rows if len(row.tokens) > 1) for step in runner.steps]
    assert max(inputs, default=0) <= chunk_size
    assert runner.tables.num_used <= runner.tables.num_blocks
    engine.close()


@given(requests=requests_of(max_sources=1), chunk_size=st.integers(1, 60), num_slots=st.integers(1, 6))
def test_scoring_feeds_little_more_than_the_distinct_prefixes(
    requests: list[Request], chunk_size: int, num_slots: int
) -> None:
    """What a sequence may feed again is too little to wait for or to copy."""
    scored = [Request(request.tokens, request.num_targets) for request in requests if request.num_targets]
    engine = Engine(FakeRunner(num_slots, PACKED), chunk_size)
    engine.run(scored)
    assert engine.counters.tokens_fed <= engine.counters.tokens_distinct + MIN_COPY * len(scored)


@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_questions_behind_one_prefix_fill_every_step_but_the_ends(overlaps_steps: bool) -> None:
    requests = _questions(60, answers=4)
    runner = FakeRunner(24, PACKED, overlaps_steps=overlaps_steps)
    engine = Engine(runner, 128)
    assert_runs_as_oracle(engine, [requests])
    sizes = [step.num_tokens for step in runner.steps]
    assert engine.counters.tokens_fed <= 1.05 * engine.counters.tokens_distinct
    assert sum(sizes[2:-2]) >= 0.95 * 128 * len(sizes[2:-2]), "the first step has the prefix alone"
    assert max(len(step.rows) for step in runner.steps) >= 10
    engine.close()


def test_shared_prefix_is_named_and_only_its_last_block_copied() -> None:
    requests = _questions(12, answers=1)
    runner = FakeRunner(12, PACKED)
    Engine(runner, 512).run(requests)
    whole = PREFIX // BLOCK_SIZE
    first = [tuple(runner.tables.table(slot)[:whole]) for slot in range(12)]
    assert len(set(first)) == 1
    assert runner.blocks_copied == 11
    ends = -(-52 // BLOCK_SIZE) - whole  # each question's own blocks: 52 tokens are fed
    assert runner.tables.num_used == whole + 12 * ends


def test_prompts_ride_along_with_rows_that_decode() -> None:
    runner = FakeRunner(8, PACKED)
    decoding = [Request((1, i, 3), 0, Generation(40)) for i in range(4)]
    engine = Engine(runner, 64)
    assert_runs_as_oracle(engine, [[*decoding, *_questions(12, answers=2)]])
    assert any({1} < {len(row.tokens) for row in step.rows} for step in runner.steps)
    engine.close()
