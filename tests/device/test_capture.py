"""Decoding steps that the provider records and replays say what plain ones say."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import olive_ext
from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.rows.buckets import BucketedRunner
from olive_ext.engine.forms.rows.graph import with_buckets
from olive_ext.engine.opening import open_engine
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import ConfigError, ProviderError
from olive_ext.model import resolve
from olive_ext.model.decisions import BucketPlan
from olive_ext.text.requests import GenerationRequest, ScoringRequest
from tests.device.open import open_on
from tests.exports import VOCAB, genai_export


def _export() -> Path:
    """For graph capture: its mask is computed on the device."""
    return genai_export("llama", None, "fp32", "webgpu", ("use_webgpu_fp32=true", "enable_webgpu_graph=true"))


def _prompts() -> list[GenerationRequest]:
    rng = random.Random(0)
    texts = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 50))] for _ in range(9)]
    sampled = [GenerationRequest(text, max_new_tokens=6, temperature=0.8, seed=3) for text in texts[:3]]
    return [*(GenerationRequest(text, max_new_tokens=rng.randint(2, 14)) for text in texts), *sampled]


@pytest.mark.webgpu
@pytest.mark.slow
@pytest.mark.parametrize("strict_shapes", [False, True])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_captured_steps_find_the_same_tokens_and_scores(num_slots: int, strict_shapes: bool) -> None:
    path = _export()
    with (
        open_on("webgpu", path, num_slots=num_slots) as plain,
        open_on("webgpu", path, num_slots=num_slots, graph_capture=True, strict_shapes=strict_shapes) as captured,
    ):
        for _ in range(2):
            assert captured.generate(_prompts()) == plain.generate(_prompts())
        asked = [ScoringRequest(prompt.prompt, [7, 8, 9]) for prompt in _prompts()]
        pairs = zip(captured.loglikelihood(asked), plain.loglikelihood(asked), strict=True)
        assert max(float(np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max()) for a, b in pairs) < 1e-5
        facts = captured.describe_execution()
        assert facts["steps_captured"] > 0
        assert facts["shapes_late"] == 0
        assert facts["shapes"] == ("bucketed" if strict_shapes else "bucketed where rows decode")


@pytest.mark.webgpu
@pytest.mark.slow
def test_longer_requests_move_the_slots_and_are_captured_anew() -> None:
    path = _export()
    rng = random.Random(1)
    long = [
        GenerationRequest([rng.randrange(4, VOCAB) for _ in range(length)], max_new_tokens=5) for length in (9, 90, 300)
    ]
    with open_on("webgpu", path) as plain, open_on("webgpu", path, graph_capture=True) as captured:
        for prompt in long:
            asked = [prompt, GenerationRequest(list(prompt.prompt)[1:], max_new_tokens=5)]
            assert captured.generate(asked) == plain.generate(asked)


@pytest.mark.webgpu
@pytest.mark.slow
def test_a_graph_that_needs_the_host_is_refused() -> None:
    with pytest.raises(ProviderError, match="graph capture"):
        open_on("webgpu", genai_export("llama"), graph_capture=True)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "'engine.graph_capture' = true: CPUExecutionProvider captures no steps"),
        ({"graph": "untouched"}, "'graph_capture' = true excludes 'graph'"),
        ({"scoring": "branches"}, "'graph_capture' = true excludes 'scoring'"),
    ],
)
def test_what_cannot_be_captured_is_refused(written: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        olive_ext.open(genai_export("llama", None), engine={"graph_capture": True, **written})


class _Stale:
    """A runner whose second step of one shape says what the first said, as a replay that reads nothing new would."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._kept: StepOutput | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def run(self, step: Step) -> StepOutput:
        output = self._runner.run(step)
        if step.width is None or len(step.rows) == 1:
            return output
        self._kept = self._kept or output
        return self._kept


def _cpu_engine() -> Engine:
    config = EngineConfig(scoring="rows", num_slots=3)
    path = str(genai_export("llama", None))
    return open_engine(resolve(ModelSettings(model=path, execution_provider="cpu", engine=config)))


def test_a_replay_that_reads_nothing_new_is_noticed_when_the_model_is_opened() -> None:
    engine = _cpu_engine()
    wanted = BucketPlan("decoding", is_captured=True)
    assert isinstance(with_buckets(engine.runner, VOCAB, 256, wanted, []), BucketedRunner)
    with pytest.raises(ConfigError, match=r"'engine\.graph_capture' = true: replays"):
        with_buckets(_Stale(engine.runner), VOCAB, 256, wanted, [])  # type: ignore[arg-type]
    engine.close()
