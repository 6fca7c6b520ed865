"""Forms of a step and of a graph beside the table of agreement: what is said of them, when they are refused, and that
one which computes something else is noticed while a model is opened."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import olive_ext
from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import Engine, open_engine
from olive_ext.engine.forms.buckets import BucketedRunner, with_buckets
from olive_ext.engine.forms.tree import check_tree_batches
from olive_ext.engine.step import Row, Step, StepOutput
from olive_ext.errors import ConfigError, RunError
from olive_ext.model import resolve
from olive_ext.model.decisions import BucketPlan
from olive_ext.model.files.content import load_graph
from olive_ext.model.providers.devices import Provider
from olive_ext.model.spec.decoder_spec import read_spec
from tests.exports import CONTEXT, VOCAB, export, genai_export
from tests.refusals import refused


@contextmanager
def _engine() -> Iterator[Engine]:
    config = EngineConfig(scoring="rows", num_slots=3)
    settings = ModelSettings(model=str(genai_export("llama")), execution_provider="cpu", engine=config)
    engine = open_engine(resolve(settings))
    yield engine
    engine.close()


class Faulty:
    """A runner whose steps of one form are changed before it runs them, or their outputs after."""

    def __init__(self, runner: Any, run: Callable[[Any, Step], StepOutput]) -> None:
        self._runner, self._run = runner, run

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def run(self, step: Step) -> StepOutput:
        return self._run(self._runner, step)


def _with_rows(runner: Any, step: Step, change: Callable[[Row], Row]) -> StepOutput:
    output: StepOutput = runner.run(dataclasses.replace(step, rows=tuple(change(row) for row in step.rows)))
    return output


def _wanted(provider: Provider, *, exposes_rows: bool = False, **written: object) -> str:
    spec = read_spec(load_graph(genai_export("llama") / "model.onnx"), {"model": {"context_length": CONTEXT}})
    return BucketPlan.of(EngineConfig.parse(written), provider, spec, is_compared=exposes_rows).steps


def test_auto_has_few_shapes_where_the_provider_plans_for_each() -> None:
    planning, plain = (Provider("P", "cpu", plans_shapes=plans) for plans in (True, False))
    assert (_wanted(planning), _wanted(plain)) == ("all", "none")
    assert (_wanted(planning, shapes="any"), _wanted(plain, shapes="bucketed")) == ("none", "all")
    assert (_wanted(planning, scoring="tree"), _wanted(plain, strict_shapes=True)) == ("none", "all")
    assert _wanted(planning, exposes_rows=True) == "none"


def test_strict_shapes_are_refused_beside_a_reference_and_for_returned_caches() -> None:
    path = genai_export("llama")
    with refused(ConfigError, "wrong_value", "engine.strict_shapes"):
        olive_ext.open(path, reference=path, engine={"strict_shapes": True})
    returned = genai_export("lfm2")
    with refused(ConfigError, "wrong_value", "engine.strict_shapes"):
        olive_ext.open(returned, engine={"strict_shapes": True})
    with olive_ext.open(returned, engine={"shapes": "bucketed"}) as session:
        assert any("any shape" in note for note in session.describe_execution()["notes"])


def test_few_shapes_that_change_numbers_are_noticed() -> None:
    """Rows here see what they were filled up with."""

    def seeing(runner: Any, step: Step) -> StepOutput:
        more = 0 if step.width is None else 1
        return _with_rows(runner, step, lambda row: row._replace(past=row.past + more * (row.past > 0)))

    with _engine() as engine:
        notes: list[str] = []
        assert isinstance(with_buckets(engine.runner, VOCAB, 256, BucketPlan("all"), notes), BucketedRunner)
        assert not notes
        faulty: Any = Faulty(engine.runner, seeing)
        assert with_buckets(faulty, VOCAB, 256, BucketPlan("all"), notes) is faulty
        assert "nats off" in notes[0]
        with refused(ConfigError, "wrong_value", "engine.strict_shapes"):
            with_buckets(faulty, VOCAB, 256, BucketPlan("all", is_strict=True), notes)


def test_a_replay_that_reads_nothing_new_is_noticed() -> None:
    """A second step of one shape says here what the first said."""
    kept: list[StepOutput] = []

    def stale(runner: Any, step: Step) -> StepOutput:
        output: StepOutput = runner.run(step)
        if step.width is None or len(step.rows) == 1:
            return output
        kept.append(output)
        return kept[0]

    wanted = BucketPlan("decoding", is_captured=True)
    with _engine() as engine:
        assert isinstance(with_buckets(engine.runner, VOCAB, 256, wanted, []), BucketedRunner)
        faulty: Any = Faulty(engine.runner, stale)
        with refused(ConfigError, "wrong_value", "engine.graph_capture"):
            with_buckets(faulty, VOCAB, 256, wanted, [])


@pytest.mark.parametrize(("is_failing", "said"), [(False, "nats off"), (True, "planted")])
def test_tree_batches_that_a_device_computes_wrongly_are_noticed(is_failing: bool, said: str) -> None:
    """They see what lies in other cells than they are told."""

    def wrong(runner: Any, step: Step) -> StepOutput:
        first = step.first_cell
        if first is None or len(step.rows) == 1:
            return runner.run(step)  # type: ignore[no-any-return]
        if is_failing:
            raise RunError("planted")
        return _with_rows(runner, step, lambda row: row._replace(cells_P=(row.cells_P + 1) % first))

    settings = ModelSettings(model=str(genai_export("llama")), execution_provider="cpu")
    engine = open_engine(resolve(settings))
    runner: Any = engine.runner
    assert check_tree_batches(runner, VOCAB) is None
    faulty: Any = Faulty(runner, wrong)
    assert said in (check_tree_batches(faulty, VOCAB) or "")
    engine.close()


def test_slots_that_are_chosen_count_windowed_layers_at_full_length() -> None:
    package = export("gemma3_text-genai-0.18")
    config = json.loads((package.path / "genai_config.json").read_text())
    spec = read_spec(load_graph(package.path / "model.onnx"), config)
    assert {tensor.window for tensor in spec.kv} == {16, None}
    assert spec.bytes_per_position == sum(tensor.heads * tensor.head_size * 4 for tensor in spec.kv)
