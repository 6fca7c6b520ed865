"""Steps of few shapes score and generate what steps of any shape do, on real graphs."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olive_ext
from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.forms.buckets import BucketedRunner, with_buckets
from olive_ext.engine.opening import open_engine
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import ConfigError, RunError
from olive_ext.model import resolve
from olive_ext.model.decisions import BucketPlan
from olive_ext.model.files.content import load_graph
from olive_ext.model.providers.devices import Provider
from olive_ext.model.spec.decoder_spec import read_spec
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.agreement.texts import questions_with_endings
from tests.exports import CONTEXT, VOCAB, genai_export
from tests.refusals import refused

pytestmark = pytest.mark.slow


def _open(path: Path, **engine: object) -> Session:
    return olive_ext.open(path, engine={"num_slots": 4, "scoring": "rows", **engine})


def _prompts() -> list[GenerationRequest]:
    rng = random.Random(5)
    texts = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(11)]
    return [GenerationRequest(text, max_new_tokens=rng.randint(1, 12)) for text in texts]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("graph", ["scoring_head", "untouched"])
def test_few_shapes_score_and_generate_what_any_shape_does(family: str, graph: str) -> None:
    path = genai_export(family, None)
    with _open(path, graph=graph) as free, _open(path, graph=graph, strict_shapes=True) as shaped:
        outputs = [session.loglikelihood(questions_with_endings(4, (1, 6, 90))) for session in (free, shaped)]
        expected, found = (np.array([score for output in each for score in output.token_logprobs]) for each in outputs)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert shaped.generate(_prompts()) == free.generate(_prompts())
        facts = shaped.describe_execution()
        assert facts["shapes"] == "bucketed"
        assert facts["shapes_late"] == 0
        assert 0 < facts["shapes_warmed"] < 150
        assert facts["warm_up_s"] > 0
        assert facts["counters"]["tokens_fed"] == free.describe_execution()["counters"]["tokens_fed"]


def test_sampled_answers_are_the_same_in_few_shapes() -> None:
    asked = [GenerationRequest([5, 6, 7 + place], max_new_tokens=6, temperature=1.0, seed=place) for place in range(6)]
    path = genai_export("llama", None)
    with _open(path) as free, _open(path, strict_shapes=True) as shaped:
        assert shaped.generate(asked) == free.generate(asked)


def test_a_shape_that_was_not_run_ahead_is_counted_or_refused() -> None:
    answers = [ScoringRequest([5, 6, 7], [token]) for token in range(80)]  # 80 targets behind one token
    path = genai_export("llama", None)
    with _open(path, shapes="bucketed") as session:
        session.loglikelihood(answers)
        assert session.describe_execution()["shapes_late"] == 1
    with _open(path, strict_shapes=True) as session:
        with refused(RunError, "failed", holds=("strict_shapes", "1", "8", "256")):
            session.loglikelihood(answers)
        assert session.loglikelihood(answers[:9])[0].token_logprobs


def _wanted(provider: Provider, *, exposes_rows: bool = False, **written: object) -> str:
    spec = read_spec(load_graph(genai_export("llama", None) / "model.onnx"), {"model": {"context_length": CONTEXT}})
    return BucketPlan.of(EngineConfig.parse(written), provider, spec, is_compared=exposes_rows).steps


def test_auto_has_few_shapes_where_the_provider_plans_for_each() -> None:
    planning, plain = (Provider("P", "cpu", plans_shapes=plans) for plans in (True, False))
    assert (_wanted(planning), _wanted(plain)) == ("all", "none")
    assert (_wanted(planning, shapes="any"), _wanted(plain, shapes="bucketed")) == ("none", "all")
    assert (_wanted(planning, scoring="tree"), _wanted(plain, strict_shapes=True)) == ("none", "all")
    assert _wanted(planning, exposes_rows=True) == "none"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"shapes": "any", "strict_shapes": True},
            {"code": "contradiction", "field": "engine.strict_shapes", "holds": "shapes"},
        ),
        (
            {"scoring": "tree", "shapes": "bucketed"},
            {"code": "contradiction", "field": "engine", "holds": ("shapes", "scoring")},
        ),
        (
            {"overlaps_steps": True, "strict_shapes": True},
            {"code": "contradiction", "field": "engine", "holds": ("strict_shapes", "overlaps_steps")},
        ),
        (
            {"graph": "untouched", "graph_capture": True},
            {"code": "contradiction", "field": "engine.graph_capture", "holds": "graph"},
        ),
        ({"runtime": "genai", "strict_shapes": True}, {"code": "missing", "field": "engine.strict_shapes"}),
    ],
)
def test_settings_that_exclude_each_other_are_refused(written: dict[str, object], message: dict[str, Any]) -> None:
    with refused(ConfigError, **message):
        olive_ext.open(genai_export("llama", None), engine=written)


def test_strict_shapes_are_refused_beside_a_reference_and_for_returned_caches() -> None:
    path = genai_export("llama", None)
    with refused(ConfigError, "wrong_value", "engine.strict_shapes"):
        olive_ext.open(path, reference=path, engine={"strict_shapes": True})
    returned = genai_export("lfm2", None)
    with refused(ConfigError, "wrong_value", "engine.strict_shapes"):
        olive_ext.open(returned, engine={"strict_shapes": True})
    with olive_ext.open(returned, engine={"shapes": "bucketed"}) as session:
        assert any("any shape" in note for note in session.describe_execution()["notes"])


class _Seeing:
    """A runner whose rows see what they were filled up with."""

    def __init__(self, runner: OrtRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def run(self, step: Step) -> StepOutput:
        if step.width is None:
            return self._runner.run(step)
        rows = tuple(row._replace(past=row.past + (row.past > 0)) for row in step.rows)
        return self._runner.run(dataclasses.replace(step, rows=rows))


def test_a_model_that_few_shapes_do_not_fit_is_noticed() -> None:
    path = genai_export("llama", None)
    engine = open_engine(
        resolve(ModelSettings(model=str(path), execution_provider="cpu", engine=EngineConfig(scoring="rows")))
    )
    runner = engine.runner
    assert isinstance(runner, OrtRunner)
    notes: list[str] = []
    assert isinstance(with_buckets(runner, VOCAB, 256, BucketPlan("all"), notes), BucketedRunner)
    assert not notes
    seeing = _Seeing(runner)
    assert with_buckets(seeing, VOCAB, 256, BucketPlan("all"), notes) is seeing
    assert "nats off" in notes[0]
    with refused(ConfigError, "wrong_value", "engine.strict_shapes"):
        with_buckets(seeing, VOCAB, 256, BucketPlan("all", is_strict=True), notes)
    engine.close()
