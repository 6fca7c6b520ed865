"""Outputs that are NaN or infinite stop a run by name: of requests that are scored, sampled, generated, compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olive_ext
from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import FinishReason, Generation, Request, Sampling
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import NonFiniteError
from tests.engine.fake_runner import RANGE, FakeRunner
from tests.exports import genai_export
from tests.refusals import refused


class BrokenRunner(FakeRunner):
    """Gives `value` for the log-probability of `token` and, with `in_samples`, among the logits to sample from."""

    value = np.nan
    token = 3
    in_samples = False

    def _execute(self, step: Step) -> StepOutput:
        output = super()._execute(step)
        logprobs_T = output.target_logprobs.copy()
        logprobs_T[[token == self.token for _, token in step.targets]] = self.value
        samples_KV = output.sample_logits_KV.copy()
        if self.in_samples:
            samples_KV[:, 1] = self.value
        return replace(output, target_logprobs=logprobs_T, sample_logits_KV=samples_KV)


def _engine(value: float, *, token: int = 3, in_samples: bool = False) -> Engine:
    runner = BrokenRunner(2, RANGE)
    runner.value, runner.token, runner.in_samples = value, token, in_samples
    return Engine(runner, 4)


SAMPLED = Generation(4, sampling=Sampling(temperature=1.0))


@pytest.mark.parametrize(
    ("value", "how", "request_", "holds"),
    [
        (np.nan, {}, Request((2, 2, 2, 3, 1), 2), ("request 1", "3 tokens", "token 3: nan")),
        (np.inf, {}, Request((2, 2, 2, 3, 1), 2), ("request 1", "3 tokens", "token 3: inf")),
        (np.nan, {"token": 0}, Request((1, 3), 0, Generation(4)), ("request 1", "2 tokens")),
        (np.nan, {"in_samples": True}, Request((2, 2), 0, SAMPLED), ("request 1", "2 tokens")),
    ],
    ids=["score", "infinite score", "prompt of a generation", "logits to sample from"],
)
def test_output_that_is_not_finite_names_request_and_position(
    value: float, how: dict[str, Any], request_: Request, holds: tuple[str, ...]
) -> None:
    """The engine is usable after it."""
    engine, sound = _engine(value, **how), Request((1, 2, 1, 1), 2)
    with refused(NonFiniteError, "not_finite", holds=holds):
        engine.run([sound, request_])
    assert np.isfinite(engine.run([sound])[0].logprobs).all()


def test_log_probability_of_a_suppressed_token_is_lawful() -> None:
    (result,) = _engine(-np.inf).run([Request((2, 2, 2, 3), 1)])
    assert result.logprobs == (-np.inf,)


class LateRunner(FakeRunner):
    """Gives NaN for every target of a step whose rows begin behind `first` positions or later."""

    first = 4

    def _execute(self, step: Step) -> StepOutput:
        output = super()._execute(step)
        if step.rows[0].past < self.first:
            return output
        return replace(output, target_logprobs=np.full_like(output.target_logprobs, np.nan))


@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_nan_that_begins_late_in_a_greedy_text_stops_it(overlaps_steps: bool) -> None:
    engine = Engine(LateRunner(2, RANGE, overlaps_steps=overlaps_steps), 4)
    with refused(NonFiniteError, "not_finite", holds="5"):
        engine.run([Request((1, 2), 0, Generation(9)), Request((1, 3), 0, Generation(9))])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_reported_generation_ends_where_its_output_is_not_finite(sampling: Sampling) -> None:
    runner = BrokenRunner(2, RANGE)
    runner.token, runner.in_samples = 0, True  # the prompt's output is looked at by token 0
    engine = Engine(runner, 4, reports_non_finite=True)
    (result,) = engine.run([Request((1, 3), 0, Generation(4, sampling=sampling))])
    assert (result.tokens, result.finish_reason, engine.counters.non_finite) == ((), FinishReason.NON_FINITE, 1)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A package with NaN among its weights."""
    package = tmp_path / "broken"
    shutil.copytree(genai_export("llama"), package)
    numbers = np.fromfile(package / "model.onnx.data", np.float32)
    numbers[::97] = np.nan
    numbers.tofile(package / "model.onnx.data")
    return package


def test_package_with_nan_among_its_weights_gives_no_number_and_no_verdict(broken: Path) -> None:
    whole = genai_export("llama")
    with olive_ext.open(broken) as session, pytest.raises(NonFiniteError):
        session.generate([[5, 6, 7]])
    for candidate, reference in ((broken, None), (broken, whole), (whole, broken)):
        with olive_ext.open(candidate, reference=reference) as session, refused(NonFiniteError, "not_finite"):
            session.loglikelihood([([5, 6, 7], [8, 9])])
