"""Steps of few shapes over a fake runner: results equal the oracle, and all but the rarest shapes were run ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.base import StepForm
from olive_ext.engine.forms.buckets import FEW_READS, BucketedRunner, shape_of, step_sizes
from olive_ext.engine.requests import Request
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import MemoryShortageError, RunError
from tests.engine.fake_runner import POOL, RANGE, SINGLE, FakeRunner, oracle
from tests.engine.strategies import assert_equal, assert_runs_as_oracle, requests_of


class _Watching(FakeRunner):
    """Notes the capacity at which each step ran, and asks for masks that reach to it."""

    def run(self, step: Step) -> StepOutput:
        assert step.width == self.capacity.positions
        return super().run(step)


@given(
    calls=st.lists(requests_of(max_sources=1), min_size=1, max_size=3),
    num_slots=st.integers(1, 8),
    chunk_size=st.integers(1, 20),
    batching=st.sampled_from([RANGE, POOL, SINGLE]),
)
def test_few_shapes_equal_oracle_and_those_with_few_targets_were_run_ahead(
    calls: list[list[Request]], num_slots: int, chunk_size: int, batching: StepForm
) -> None:
    fake = _Watching(num_slots, batching)
    runner = BucketedRunner(fake, step_sizes(chunk_size))
    engine = Engine(runner, chunk_size)
    assert_runs_as_oracle(engine, calls)
    facts = runner.describe()
    shapes = {shape_of(step) for step in fake.steps}
    many = {shape for shape in shapes if shape.reads >= 4 * max(FEW_READS, shape.tokens)}
    assert (facts["shapes_warmed"], facts["shapes_late"]) == (len(shapes - many), len(many))
    assert {shape.tokens for shape in shapes} <= set(step_sizes(chunk_size))
    assert {shape.rows for shape in shapes} <= {1, num_slots}


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (8, (1, 8)), (31, (1, 8, 16, 31)), (100, (1, 8, 16, 32, 48, 64, 96, 100))],
)
def test_sizes_end_with_the_longest_step(most: int, expected: tuple[int, ...]) -> None:
    assert step_sizes(most) == expected


class _Short(FakeRunner):
    """Has no memory for more than 16 reads."""

    def run(self, step: Step) -> StepOutput:
        if len(step.logits_rows) > 16:
            raise MemoryShortageError("no memory")
        return super().run(step)


def test_shapes_that_memory_does_not_hold_are_left_out_and_their_steps_halved() -> None:
    tokens = tuple(number % 4 for number in range(60))
    request = Request(tokens, num_targets=59)
    runner = BucketedRunner(_Short(2, RANGE), step_sizes(64))
    engine = Engine(runner, 64)
    assert_equal(engine.run([request])[0], oracle(request))
    assert engine.counters.steps_halved > 0
    strict = Engine(BucketedRunner(_Short(2, RANGE), step_sizes(64), is_strict=True), 64)
    with pytest.raises(RunError, match="were not run beforehand"):
        strict.run([request])
