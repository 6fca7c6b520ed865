"""Which packed steps are captured, in which shape, and what the trial before that notices: no device is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import olive_ext
from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.packed import IDLE_SLOT, PLAIN_RUNS, ROUNDS, PackedCapture, check_captured_steps
from olive_ext.engine.opening import open_engine
from olive_ext.engine.step import LogitsRow, Row, Step, StepOutput
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.role_inputs import COMPUTE, StepArrays
from olive_ext.model.types import Role, TensorSpec
from tests.exports import VOCAB, genai_export


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


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (64, 64), (65, 128), (512, 512)])
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
        _step([3] * 513),
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
        self._first: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def describe(self) -> dict[str, int]:
        return {"steps_replayed": 0 if self._fault == "none" else max(0, len(self._kept) - ROUNDS)}

    def run(self, step: Step) -> StepOutput:
        if not step.logits_rows:
            return self._runner.run(step)
        if len(self._kept) >= ROUNDS:
            self._first.append(step)
            first = self._first[0]
            if self._fault == "stale":
                return self._keep(self._kept[ROUNDS] if len(self._kept) > ROUNDS else self._runner.run(step))
            if self._fault == "lengths":
                rows = tuple(row._replace(past=one.past) for row, one in zip(step.rows, first.rows, strict=True))
                return self._keep(self._runner.run(replace(step, rows=rows)))
            if self._fault == "tokens":
                rows = tuple(row._replace(tokens=one.tokens) for row, one in zip(step.rows, first.rows, strict=True))
                return self._keep(self._runner.run(replace(step, rows=rows)))
            if self._fault == "rows":
                output = self._runner.run(step)
                return self._keep(replace(output, target_logprobs=output.target_logprobs[::-1]))
        return self._keep(self._runner.run(step))

    def _keep(self, output: StepOutput) -> StepOutput:
        self._kept.append(output)
        return output


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(scoring="rows", num_slots=3)
    opened = open_engine(resolve(ModelSettings(model=str(genai_export("llama", None)), engine=config)))
    yield opened
    opened.close()


@pytest.mark.parametrize("fault", ["", "none", "stale", "lengths", "tokens", "rows"])
def test_trial_notices_replays_that_are_wrong(engine: Engine, fault: str) -> None:
    """None are made; the first's results; lengths or tokens as they were captured; rows in another order."""
    problem = check_captured_steps(_Replays(engine.runner, fault), VOCAB, 64)  # type: ignore[arg-type]
    assert (problem is None) == (fault == ""), problem


def test_auto_runs_plain_steps_elsewhere() -> None:
    """On the CPU a note says so."""
    with olive_ext.open(genai_export("llama", None), engine={"graph_capture": "auto"}) as session:
        facts = session.describe_execution()
    assert "steps_captured" not in facts
    assert 'steps are not captured: "auto" captures packed steps on CUDA' in facts["notes"]
