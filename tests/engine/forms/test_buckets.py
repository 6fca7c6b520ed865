"""Steps of few shapes over a fake runner: results equal the oracle, and all but the rarest shapes were run ahead.

What stays bound between steps.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.buckets import FEW_READS, BucketedRunner, shape_of, step_sizes
from olive_ext.engine.requests import Request
from olive_ext.engine.runners.ort.ort_runner import run_plainly
from olive_ext.engine.runners.runner import StepForm
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import MemoryShortageError, RunError
from olive_ext.model.providers.bindings import InputFeed
from olive_ext.model.providers.devices import Device
from tests.engine.fake_runner import POOL, RANGE, SINGLE, FakeRunner, oracle
from tests.engine.strategies import assert_equal, assert_runs_as_oracle, requests_of
from tests.graph.text import model_from, session_of
from tests.refusals import refused


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
    with refused(RunError, "failed", holds=("strict_shapes", "1 x 32 tokens", "64 reads")):
        strict.run([request])


def test_what_is_no_tensor_is_left_out_of_a_plain_run() -> None:
    """As an output that ONNX Runtime 1.27 has optimized away: `numpy` of a sequence ended in its words."""
    model = model_from("sequence (int64[N] x) => (int64[N] y) { held = SequenceConstruct (x) y = Identity (x) }")
    model.graph.output.append(helper.make_tensor_sequence_value_info("held", onnx.TensorProto.INT64, None))
    session = session_of(model)
    values = run_plainly(session, {"x": ort.OrtValue.ortvalue_from_numpy(np.array([1, 2]))})
    assert {name: value.tolist() for name, value in values.items()} == {"y": [1, 2]}


def test_inputs_are_bound_on_releases_that_do_not_say_where_they_lie() -> None:
    """ONNX Runtime 1.23, at which Python 3.10 ends, has no `get_input_memory_infos`."""
    session: ort.InferenceSession = SimpleNamespace(get_inputs=lambda: [SimpleNamespace(name="x")])  # type: ignore[assignment]
    bound: list[tuple[str, list[int]]] = []
    binding: ort.IOBinding = SimpleNamespace(bind_cpu_input=lambda name, array: bound.append((name, array.tolist())))  # type: ignore[assignment]
    for kind in ("cpu", "cuda"):
        InputFeed(session, Device(kind)).bind(binding, "x", np.array([1]))
    assert bound == [("x", [1])] * 2
