"""Packed steps over the fake runner, whose slots are made of blocks: results, the tokens fed, the blocks copied.

Which packed steps are captured, in which shape, and what the trial before that notices: no device is needed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import Engine, open_engine
from olive_ext.engine.forms.packed import IDLE_SLOT, PLAIN_RUNS, ROUNDS, PackedCapture, check_captured_steps
from olive_ext.engine.requests import Beams, Generation, Request, Sampling, ThinkingBudget
from olive_ext.engine.step import UNLIMITED, LogitsRow, Row, Step, StepOutput
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.role_inputs import COMPUTE, StepArrays
from olive_ext.model.types import Role, TensorSpec
from tests import exports
from tests.engine.fake_runner import PACKED, VOCAB, FakeRunner
from tests.engine.strategies import assert_runs_as_oracle, assert_tables_agree, questions, ran, requests_of
from tests.exports import genai_export


@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_questions_behind_one_prefix_fill_every_step_but_the_ends(overlaps_steps: bool) -> None:
    requests = questions(60, answers=4)
    runner = FakeRunner(24, PACKED, overlaps_steps=overlaps_steps)
    counters = ran(runner, requests, 128)
    sizes = [step.num_tokens for step in runner.steps]
    assert counters.tokens_fed <= 1.05 * counters.tokens_distinct
    assert sum(sizes[2:-2]) >= 0.95 * 128 * len(sizes[2:-2]), "the first step has the prefix alone"
    assert max(len(step.rows) for step in runner.steps) >= 10


def _copied(requests: list[Request], num_slots: int = 64) -> FakeRunner:
    """A runner with blocks of 256 positions after these requests, in steps of up to 1,024 tokens."""
    runner = FakeRunner(num_slots, PACKED, 2048, overlaps_steps=True, block_size=256)
    engine = Engine(runner, 1024)
    engine.run(requests)
    engine.close()
    return runner


def _texts(count: int, prefix: int, own: int) -> list[tuple[int, ...]]:
    """So many texts of one length after a common prefix, which part at once."""
    rng = random.Random(count)
    words = lambda n: tuple(rng.randrange(VOCAB) for _ in range(n))  # noqa: E731
    shared = words(prefix)
    return [(*shared, i, *words(own - 1)) for i in range(count)]


@given(
    requests=requests_of(max_sources=1),
    seeds=st.lists(st.integers(0, 3), max_size=4),
    searches=st.lists(st.integers(2, 3), max_size=2),
    most_blocks=st.integers(18, 40),
    overlaps_steps=st.booleans(),
)
def test_drawn_and_searched_answers_do_not_depend_on_blocks(
    requests: list[Request], seeds: list[int], searches: list[int], most_blocks: int, overlaps_steps: bool
) -> None:
    """An answer is a function of its request and its seed: one that was given up goes on with the draws it had left."""
    drawn = [Request((1, 2, seed), 0, Generation(20, sampling=Sampling(1.0, seed=seed))) for seed in seeds]
    searched = [Request((3, count), 0, Generation(6, beams=Beams(count))) for count in searches]
    asked = [*drawn, *requests, *searched]
    few = FakeRunner(5, PACKED, overlaps_steps=overlaps_steps, most_blocks=most_blocks)
    engine, plain = Engine(few, 9), Engine(FakeRunner(5, PACKED), 9)
    assert engine.run(asked) == plain.run(asked)
    if few.steps:
        assert_tables_agree(engine, few)
    engine.close()


def test_text_that_is_given_up_within_its_targets_goes_on_with_the_next() -> None:
    answers = [Request((i,), 0, Generation(13)) for i in range(4)]
    counters = ran(FakeRunner(5, PACKED, most_blocks=11), [*answers, Request((10, *[2, 3] * 4), 8)], 2)
    assert counters.preemptions > 0


def _thinking(count: int) -> list[Request]:
    """Answers of one length, with budgets that end at other steps, by markers of one to three tokens."""
    answers = (Generation(40, thinking=ThinkingBudget(i * 5 % 31, (7, 8, 9)[: 1 + i % 3])) for i in range(count))
    return [Request((i, 2, 3), 0, answer) for i, answer in enumerate(answers)]


@pytest.mark.parametrize("most_blocks", [64, UNLIMITED], ids=["few_blocks", "many_blocks"])
def test_tokens_that_a_budget_puts_there_are_never_computed_beside_what_the_model_finds(most_blocks: int) -> None:
    """Every row is fed its answer's own token: none that the step before found in place of a forced one, also where
    sequences are given up and beams decode beside them."""
    searched = [Request((3, i), 0, Generation(12, beams=Beams(2))) for i in range(3)]
    drawn = [replace(one, generation=replace(one.generation, sampling=Sampling(1.0))) for one in _thinking(4)]
    asked = [one for some in zip_longest(_thinking(12), searched, drawn) for one in some if one is not None]
    runner = FakeRunner(12, PACKED, overlaps_steps=True, most_blocks=most_blocks)
    engine, alone = Engine(runner, 64), Engine(FakeRunner(2, PACKED), 64)
    found = engine.run(asked)
    assert found == [alone.run([request])[0] for request in asked]
    assert_runs_as_oracle(engine, [_thinking(12)])
    assert engine.counters.rows_dropped == 0
    assert (engine.counters.preemptions > 0) is (most_blocks < UNLIMITED)
    assert 0 < engine.counters.steps_overlapped < engine.counters.steps
    engine.close()


def _capture() -> PackedCapture:
    session: Any = SimpleNamespace(get_outputs=list)
    return PackedCapture(session, Device("cuda"))


def _step(pasts: list[int], **how: Any) -> Step:
    rows = tuple(Row(slot, past, (9,)) for slot, past in enumerate(pasts))
    return Step(rows, tuple(LogitsRow(row, 0) for row in range(len(rows))), **how)


def _captured(step: Step) -> Step | None:
    """The step as it runs when it has been seen often; None where it runs plainly."""
    capture = _capture()
    seen = [capture.prepared(step, 8) for _ in range(PLAIN_RUNS + 1)]
    assert not any(is_captured for _, is_captured in seen[:-1])
    return seen[-1][0] if seen[-1][1] else None


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (33, 64), (64, 64)])
def test_rows_are_filled_up_with_idle_ones_to_a_power_of_two(num_rows: int, bucket: int) -> None:
    """What is read of idle rows is the first row's, and those that exist are what they were."""
    step = _step([7] * num_rows, targets=((0, 5),), samples=(0,), follows=tuple(range(num_rows)))
    padded = _captured(step)
    assert padded is not None
    assert [len(padded.rows), len(padded.logits_rows), len(padded.targets), len(padded.samples)] == [bucket] * 4
    assert padded.rows[:num_rows] == step.rows
    assert {row.slot for row in padded.rows[num_rows:]} <= {IDLE_SLOT}
    assert padded.follows == (*range(num_rows), *[-1] * (bucket - num_rows))


@pytest.mark.parametrize(
    "step",
    [
        _step([3] * 65),
        replace(_step([3]), rows=(Row(0, 3, (9, 9)),)),
        _step([3], targets=((0, 5), (0, 6))),
        _step([3, 4], beams=(0, 1), num_candidates=4),
        _step([3], whole_length=4097),
    ],
    ids=["rows", "tokens", "targets", "beams", "sides"],
)
def test_other_steps_run_plainly(step: Step) -> None:
    """More rows than a bucket has, a prompt's tokens, more targets than rows, beams, and what depends on a length."""
    assert _captured(step) is None


def test_a_step_that_reads_nothing_has_a_row_to_read() -> None:
    """The head of a session that captures always has one."""
    step, is_captured = _capture().prepared(Step((Row(0, 0, (4, 5)),)), 8)
    assert (step.logits_rows, is_captured) == ((LogitsRow(0, 0),), False)


def test_bounds_are_the_same_for_all_steps_of_a_shape() -> None:
    """They hold for each: a captured step keeps those of the first."""
    for longest in (1, 2, 255, 256, 257, 511, 512, 513, 600, 1023, 1024, 1025, 5000):
        padded = _captured(_step([longest - 1, 0, 3]))
        assert padded is not None
        width = padded.width or 0
        bounds = []
        for most in (longest, width, max(1, width // 2 + 1 if width > 256 else 1)):
            total = np.array([most, 1])
            arrays = StepArrays(np.zeros(2, np.int64), np.ones(2, np.int64), total - 1, total, total - 1, width)
            given = COMPUTE[Role.ATTENTION_BOUNDS](arrays, TensorSpec("bounds", 6, (3,)))
            assert given[2] <= most <= given[1]
            bounds.append(given.tolist())
        assert bounds == [bounds[0]] * 3
        assert (bounds[0][2] > 512) == (longest > 512)  # where CUDA's kernel splits keys


class _Replays:
    """A runner whose steps that decode are, from the second time on, what a broken replay would find."""

    def __init__(self, runner: Any, fault: str) -> None:
        self._runner, self._fault, self._kept = runner, fault, list[StepOutput]()
        self._first: Step | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def describe(self) -> dict[str, int]:
        return {"steps_replayed": 0 if self._fault == "none" else max(0, len(self._kept) - ROUNDS)}

    def run(self, step: Step) -> StepOutput:
        if not step.logits_rows:
            return self._runner.run(step)
        is_replay = len(self._kept) >= ROUNDS
        if is_replay:
            self._first = self._first or step
            if self._fault in ("past", "tokens"):
                pairs = zip(step.rows, self._first.rows, strict=True)
                rows = tuple(row._replace(**{self._fault: getattr(one, self._fault)}) for row, one in pairs)
                step = replace(step, rows=rows)
        output = self._runner.run(step)
        if is_replay and self._fault == "rows":
            output = replace(output, target_logprobs=output.target_logprobs[::-1])
        self._kept.append(output)
        return self._kept[ROUNDS] if is_replay and self._fault == "stale" else output


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(scoring="rows", num_slots=3)
    opened = open_engine(resolve(ModelSettings(model=str(genai_export("llama", None)), engine=config)))
    yield opened
    opened.close()


@pytest.mark.parametrize("fault", ["", "none", "stale", "past", "tokens", "rows"])
def test_trial_notices_replays_that_are_wrong(engine: Engine, fault: str) -> None:
    """None are made; the first's results; lengths or tokens as they were captured; rows in another order."""
    problem = check_captured_steps(_Replays(engine.runner, fault), exports.VOCAB, 64)  # type: ignore[arg-type]
    assert (problem is None) == (fault == ""), problem
