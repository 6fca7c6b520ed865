"""Short answers that share steps over the fake runner: results, how many steps, what is copied; and what they cost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.scheduling.answer_steps import MIN_ANSWERS, TYPICAL, AnswerCost, choose, measure
from olive_ext.engine.scheduling.tree_batch import ScoringForm
from olive_ext.engine.step import Batching, Step, StepOutput
from tests.engine.fake_runner import VOCAB, FakeRunner
from tests.engine.strategies import assert_runs_as_oracle, requests_of

BY_RULE = ScoringForm(pins_answers=True)
BATCHING = pytest.mark.parametrize("batching", [Batching.RANGE, Batching.POOL])


def _questions(count: int, answers: int, tokens: int, prefix: int = 30, own: int = 20) -> list[Request]:
    """Each question has several answers, all behind one prefix."""
    rng = random.Random(0)
    words = lambda n: tuple(rng.randrange(VOCAB) for _ in range(n))  # noqa: E731
    shared = words(prefix)
    contexts = [shared + words(own) for _ in range(count)]
    return [Request((*context, first, *words(tokens - 1)), tokens) for context in contexts for first in range(answers)]


@given(
    calls=st.lists(requests_of(max_sources=1), min_size=1, max_size=3),
    num_slots=st.integers(1, 8),
    chunk_size=st.integers(1, 40),
    batching=st.sampled_from([Batching.RANGE, Batching.POOL]),
    async_decode=st.booleans(),
)
def test_answers_that_share_steps_equal_the_oracle(
    calls: list[list[Request]], num_slots: int, chunk_size: int, batching: Batching, async_decode: bool
) -> None:
    runner = FakeRunner(num_slots, batching, answer_steps=True, async_decode=async_decode)
    engine = Engine(runner, chunk_size, BY_RULE)
    assert_runs_as_oracle(engine, calls)
    engine.close()


@given(requests=requests_of(max_sources=1), num_slots=st.integers(2, 8))
def test_answers_feed_little_more_than_the_distinct_prefixes(requests: list[Request], num_slots: int) -> None:
    scored = [Request(request.tokens, request.num_targets) for request in requests if request.num_targets]
    engine = Engine(FakeRunner(num_slots, Batching.RANGE, answer_steps=True), 40, BY_RULE)
    engine.run(scored)
    assert engine.counters.tokens_fed <= engine.counters.tokens_distinct + 16 * len(scored)


@BATCHING
@pytest.mark.parametrize("async_decode", [False, True])
def test_answers_of_many_questions_fill_steps_of_one_token_each(batching: Batching, async_decode: bool) -> None:
    requests = _questions(24, answers=8, tokens=4)
    counts = {}
    for answer_steps in (False, True):
        runner = FakeRunner(16, batching, answer_steps=answer_steps, async_decode=async_decode)
        engine = Engine(runner, 128, BY_RULE)
        assert_runs_as_oracle(engine, [requests])
        assert engine.counters.tokens_fed <= 1.01 * engine.counters.tokens_distinct
        counts[answer_steps] = engine.counters.steps
        engine.close()
    assert counts[False] == 24 * 8
    full = 24 + 24 * 7 * 3 / 16  # a step for each question, and steps in which every slot has an answer
    assert counts[True] <= 1.2 * full
    assert engine.describe()["scoring"] == "answers"


@BATCHING
def test_what_answers_share_is_copied_once_for_each_and_not_computed_again(batching: Batching) -> None:
    runner = FakeRunner(8, batching, answer_steps=True)
    engine = Engine(runner, 128, BY_RULE)
    assert_runs_as_oracle(engine, [_questions(6, answers=6, tokens=3)])
    copies = [copy for step in runner.steps for copy in step.copies]
    assert engine.counters.tokens_fed == engine.counters.tokens_distinct
    assert 0 < len(copies) <= 6 + 6 * 5


@BATCHING
def test_generations_and_answers_share_steps(batching: Batching) -> None:
    runner = FakeRunner(8, batching, answer_steps=True)
    engine = Engine(runner, 128, BY_RULE)
    asked = [Request((number, 1), 0, Generation(30)) for number in range(2)]
    assert_runs_as_oracle(engine, [[*asked, *_questions(6, answers=6, tokens=3)]])
    assert max(len(step.logits_rows) for step in runner.steps) > 4


def test_rule_takes_short_answers_and_leaves_long_ones_alone() -> None:
    limit, _ = choose(TYPICAL, [150] * 50 + [4] * 450, 16)
    assert limit == 4
    assert choose(TYPICAL, [150] * 50 + [40] * 450, 16)[0] == 0
    assert choose(TYPICAL, [150] * 50 + [4] * 450, 2)[0] == 0


@pytest.mark.parametrize(("together", "limit"), [(0.05, 4), (0.5, 0)])
def test_limit_follows_what_steps_cost(together: float, limit: int) -> None:
    cost = AnswerCost(alone=0.04, per_token=0.001, together=together, copy=0.002)
    assert choose(cost, [100] * 20 + [3] * 160, 8)[0] == limit


COST = AnswerCost(alone=0.02, per_token=0.001, together=0.03, copy=0.004)


class _Clocked(FakeRunner):
    """Steps take what `COST` says, on a clock of its own."""

    now = 0.0

    def run(self, step: Step) -> StepOutput:
        is_alone = len(step.rows) == 1
        self.now += COST.alone + COST.per_token * step.num_tokens if is_alone else COST.together
        self.now += COST.copy * len(step.copies)
        return super().run(step)


def test_measuring_finds_what_steps_and_copies_cost() -> None:
    runner = _Clocked(8, Batching.POOL, answer_steps=True)
    found = measure(runner, lambda: runner.now)
    assert (found.alone, found.per_token, found.together, found.copy) == pytest.approx((0.02, 0.001, 0.03, 0.004))


def test_work_enough_is_measured_once_and_what_it_overwrites_is_forgotten() -> None:
    requests = _questions(MIN_ANSWERS // 4, answers=6, tokens=3)
    runner = FakeRunner(8, Batching.POOL, answer_steps=True)
    engine = Engine(runner, 128, ScoringForm(is_open=True))
    assert_runs_as_oracle(engine, [requests[:12]])
    assert engine.describe()["scoring_reason"].startswith("not measured yet")
    assert_runs_as_oracle(engine, [requests, requests[:12]])
    facts = engine.describe()
    assert set(facts["answer_cost"]) == {"alone_s", "per_token_s", "together_s", "copy_s"}
    assert facts["scoring_reason"].startswith("measured")
