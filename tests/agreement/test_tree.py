"""TreeBatches score what one sequence a step scores, up to the end of the context; a device that does them wrongly is
noticed when the model is opened."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.engine.forms.tree import MIN_TOKENS, check_tree_batches
from olive_ext.engine.opening import open_engine
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.step import Step, StepOutput
from olive_ext.errors import RunError
from olive_ext.model import resolve
from olive_ext.session import Session
from tests.agreement.texts import questions_with_endings
from tests.exports import VOCAB, export, genai_export

pytestmark = pytest.mark.slow


def _open(**engine: object) -> Session:
    return olive_ext.open(genai_export("llama", None), engine=engine)


def _scores(session: Session, longest: int) -> np.ndarray:
    outputs = session.loglikelihood(questions_with_endings(8, (1, 1, 6, longest)))
    return np.array([score for output in outputs for score in output.token_logprobs])


@pytest.mark.parametrize(("chunk_size", "longest"), [(1, 20), (7, 60), (64, 300), (256, 300), (512, 300)])
def test_tree_batches_score_what_rows_score(chunk_size: int, longest: int) -> None:
    """Texts end at the context's end where a step is not a token or a few, which takes its time."""
    with _open(scoring="rows") as rows, _open(scoring="tree", chunk_size=chunk_size) as tree:
        np.testing.assert_allclose(_scores(tree, longest), _scores(rows, longest), atol=2e-5)
        assert (rows.describe_execution()["scoring"], tree.describe_execution()["scoring"]) == ("rows", "tree")
        assert tree.counters.tokens_fed == tree.counters.tokens_distinct
        assert tree.counters.steps <= -(-tree.counters.tokens_fed // chunk_size)


def test_the_form_is_measured_once_there_is_enough_work_and_says_so() -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(4, VOCAB) for _ in range(101)] for _ in range(MIN_TOKENS // 100 + 1)]
    with _open() as session:
        session.loglikelihood([(text[:-1], text[-1:]) for text in texts[:3]])
        assert "not measured" in session.describe_execution()["scoring_reason"]
        session.loglikelihood([(text[:-1], text[-1:]) for text in texts])
        facts = session.describe_execution()
        assert facts["scoring_reason"].startswith("measured")
        assert set(facts["step_cost"]) == {"fixed_s", "per_token_s", "per_pair_s"}


class _Wrong:
    """A runner whose tree batches see what lies in other cells than they are told."""

    def __init__(self, runner: OrtRunner, is_failing: bool) -> None:
        self._runner = runner
        self._is_failing = is_failing

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def run(self, step: Step) -> StepOutput:
        if step.first_cell is None or len(step.rows) == 1:
            return self._runner.run(step)
        if self._is_failing:
            raise RunError("planted")
        rows = tuple(row._replace(cells_P=(row.cells_P + 1) % step.first_cell) for row in step.rows)
        return self._runner.run(dataclasses.replace(step, rows=rows))


def test_a_device_that_computes_tree_batches_wrongly_is_noticed() -> None:
    path = genai_export("llama", None)
    engine = open_engine(resolve(ModelSettings(model=str(path), execution_provider="cpu")))
    runner = engine.runner
    assert isinstance(runner, OrtRunner)
    assert check_tree_batches(runner, VOCAB) is None
    assert "nats off" in (check_tree_batches(_Wrong(runner, is_failing=False), VOCAB) or "")
    assert "planted" in (check_tree_batches(_Wrong(runner, is_failing=True), VOCAB) or "")
    engine.close()


def test_rounded_activations_are_scored_in_rows_unless_tree_batches_are_asked_for() -> None:
    path = export("llama-genai-0.18-int4").path
    with olive_ext.open(path) as session:
        facts = session.describe_execution()
        assert facts["scoring"] == "rows"
        assert any("rounding of activations" in note for note in facts["notes"])
    with olive_ext.open(path, engine={"scoring": "tree"}) as session:
        assert session.describe_execution()["scoring"] == "tree"
