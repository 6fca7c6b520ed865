"""Outputs that are NaN or infinite stop a run by name: of requests that are scored, sampled, generated, compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import olive_ext
from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Generation, Request, Sampling
from olive_ext.engine.step import Batching, Step, StepOutput
from olive_ext.errors import NonFiniteError
from tests.engine.fake_runner import FakeRunner
from tests.exports import genai_export


class BrokenRunner(FakeRunner):
    """Gives `value` for the log-probability of token 3 and, with `in_samples`, among the logits to sample from."""

    value = np.nan
    in_samples = False

    def _execute(self, step: Step) -> StepOutput:
        output = super()._execute(step)
        logprobs_T = output.target_logprobs.copy()
        logprobs_T[[token == 3 for _, token in step.targets]] = self.value
        samples_KV = output.sample_logits_KV.copy()
        if self.in_samples:
            samples_KV[:, 1] = self.value
        return replace(output, target_logprobs=logprobs_T, sample_logits_KV=samples_KV)


def _engine(value: float, *, in_samples: bool = False) -> Engine:
    runner = BrokenRunner(2, Batching.RANGE)
    runner.value, runner.in_samples = value, in_samples
    return Engine(runner, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scored_target_that_is_not_finite_names_request_position_and_token(value: float) -> None:
    requests = [Request((1, 2, 0, 1), 2), Request((2, 2, 2, 3, 1), 2)]
    with pytest.raises(NonFiniteError, match=rf"request 1: .* behind 3 tokens .*token 3: {value}.*step \d"):
        _engine(value).run(requests)


def test_log_probability_of_a_suppressed_token_is_lawful() -> None:
    (result,) = _engine(-np.inf).run([Request((2, 2, 2, 3), 1)])
    assert result.logprobs == (-np.inf,)


def test_engine_is_usable_behind_the_error() -> None:
    engine = _engine(np.nan)
    with pytest.raises(NonFiniteError):
        engine.run([Request((2, 2, 3), 1)])
    (result,) = engine.run([Request((2, 2, 1), 1)])
    assert np.isfinite(result.logprobs).all()


def test_generation_begins_with_a_look_at_the_prompts_output() -> None:
    with pytest.raises(NonFiniteError, match=r"request 0: .* behind 2 tokens"):
        _engine(np.nan).run([Request((1, 3), 0, Generation(4))])


def test_logits_to_sample_from_that_are_not_finite_stop_the_generation() -> None:
    sampled = Generation(4, sampling=Sampling(temperature=1.0))
    with pytest.raises(NonFiniteError, match=r"request 0: .*a logit is NaN or infinite"):
        _engine(np.nan, in_samples=True).run([Request((1, 2), 0, sampled)])


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A package with NaN among its weights."""
    package = tmp_path / "broken"
    shutil.copytree(genai_export("llama"), package)
    numbers = np.fromfile(package / "model.onnx.data", np.float32)
    numbers[::97] = np.nan
    numbers.tofile(package / "model.onnx.data")
    return package


@pytest.mark.slow
def test_package_with_nan_among_its_weights_is_refused_when_it_is_asked(broken: Path) -> None:
    with olive_ext.open(broken) as session:
        with pytest.raises(NonFiniteError):
            session.loglikelihood([([5, 6, 7], [8, 9])])
        with pytest.raises(NonFiniteError):
            session.generate([[5, 6, 7]])


@pytest.mark.slow
def test_comparison_of_a_package_with_nan_is_no_verdict(broken: Path) -> None:
    whole = genai_export("llama")
    for candidate, reference in ((broken, whole), (whole, broken)):
        with (
            olive_ext.open(candidate, reference=reference) as session,
            pytest.raises(NonFiniteError, match=r"KL divergence from the reference: nan|log-probability"),
        ):
            session.loglikelihood([([5, 6, 7], [8, 9])])
