"""Short answers that share steps over the fake runner: results, how many steps, what is copied; and the rule."""

from __future__ import annotations

import pytest

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.base import StepForm
from olive_ext.engine.forms.rows import choose_limit
from olive_ext.engine.requests import Generation, Request
from tests.engine.fake_runner import POOL, RANGE, FakeRunner
from tests.engine.strategies import assert_runs_as_oracle, questions

BATCHING = pytest.mark.parametrize("batching", [RANGE, POOL])


@BATCHING
@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_answers_of_many_questions_fill_steps_of_one_token_each(batching: StepForm, overlaps_steps: bool) -> None:
    requests = questions(24, answers=8, tokens=4)
    counts = {}
    for answer_steps in (False, True):
        runner = FakeRunner(16, batching, answer_steps=answer_steps, overlaps_steps=overlaps_steps)
        engine = Engine(runner, 128)
        assert_runs_as_oracle(engine, [requests])
        assert engine.counters.tokens_fed <= 1.01 * engine.counters.tokens_distinct
        counts[answer_steps] = engine.counters.steps
        engine.close()
    assert counts[False] == 24 * 8
    full = 24 + 24 * 7 * 3 / 16  # a step for each question, and steps in which every slot has an answer
    assert counts[True] <= 1.2 * full
    assert engine.describe()["scoring"] == "answers"


@BATCHING
def test_what_answers_share_is_copied_once_for_each_and_not_computed_again(batching: StepForm) -> None:
    runner = FakeRunner(8, batching, answer_steps=True)
    engine = Engine(runner, 128)
    assert_runs_as_oracle(engine, [questions(6, answers=6, tokens=3)])
    copies = [copy for step in runner.steps for copy in step.copies]
    assert engine.counters.tokens_fed == engine.counters.tokens_distinct
    assert 0 < len(copies) <= 6 + 6 * 5


@BATCHING
def test_generations_and_answers_share_steps(batching: StepForm) -> None:
    runner = FakeRunner(8, batching, answer_steps=True)
    engine = Engine(runner, 128)
    asked = [Request((number, 1), 0, Generation(30)) for number in range(2)]
    assert_runs_as_oracle(engine, [[*asked, *questions(6, answers=6, tokens=3)]])
    assert max(len(step.logits_rows) for step in runner.steps) > 4


def test_rule_takes_short_answers_and_leaves_long_ones_alone() -> None:
    limit, _ = choose_limit([150] * 50 + [4] * 450, 16)
    assert limit == 4
    assert choose_limit([150] * 50 + [40] * 450, 16)[0] == 0
    assert choose_limit([150] * 50 + [4] * 450, 2)[0] == 0
