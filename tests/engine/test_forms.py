"""Forms of a step: one that is added by one class and one line, which form a model is opened with, what two share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.engine.capacity import UNLIMITED
from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.base import ReadySequences, ScoredSteps, ScoringRule, StepForm, joined
from olive_ext.engine.forms.graph_form import OpenedDecoder
from olive_ext.engine.forms.kv_store import KvPlace, KvStore
from olive_ext.engine.forms.packed import PackedOnGraph, PackedSteps, longest_step
from olive_ext.engine.forms.registry import FORMS, choose
from olive_ext.engine.forms.returned import AlikeRows
from olive_ext.engine.forms.rows import RowsOnGraph, ViewKv
from olive_ext.engine.forms.tree import TreeForm
from olive_ext.engine.opening import item_limit
from olive_ext.engine.requests import Request
from olive_ext.engine.scheduling.sequences import ChosenRows
from olive_ext.errors import ConfigError
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.decisions import Decision
from olive_ext.model.providers.devices import Provider
from olive_ext.model.types import DecoderSpec, Role
from tests.engine.fake_runner import FORMS as STEP_FORMS
from tests.engine.fake_runner import PACKED, POOL, RANGE, SINGLE, FakeRunner
from tests.engine.strategies import assert_runs_as_oracle, requests_of
from tests.exports import genai_export
from tests.refusals import refused


@dataclass(frozen=True)
class OneToken(StepForm):
    """A toy: a step has one row of one token."""

    name: ClassVar[str] = "one_token"

    def next_rows(self, ready: ReadySequences) -> ChosenRows:
        return ChosenRows([(ready.sequences[0], ready.row(ready.sequences[0], 1))])

    def decoding(self, sequences: list[Any], limit: int) -> list[Any]:
        return sequences[:1]

    def scored_steps(self, chunk_size: int, rule: ScoringRule) -> ScoredSteps:
        return ScoredSteps("one_token", "a toy")

    def runs(self, other: StepForm) -> bool:
        return isinstance(other, OneToken)


class OneTokenOnGraph(RowsOnGraph):
    """The toy on ONNX Runtime, for every graph that writes its caches in place."""

    name = "one_token"

    @classmethod
    def against(cls, model: ResolvedModel) -> str | None:
        return None if model.spec.is_kv_in_place else ""

    @classmethod
    def decision(cls, model: ResolvedModel, reason: str) -> Decision:
        return Decision("scoring", cls.name, "a toy")

    def allocate(self, place: KvPlace) -> KvStore:
        store = ViewKv(place)
        store.form = OneToken()
        return store

    def finish(self, decoder: OpenedDecoder) -> None:
        """Leaves the runner as it is."""


@pytest.fixture
def toy() -> Iterator[None]:
    FORMS.insert(0, OneTokenOnGraph)
    yield
    FORMS.remove(OneTokenOnGraph)


@given(calls=st.lists(requests_of(), min_size=1, max_size=2), num_slots=st.integers(1, 4), overlaps_steps=st.booleans())
def test_toy_form_equals_the_oracle_and_is_the_planner_s_only_word(
    calls: list[list[Request]], num_slots: int, overlaps_steps: bool
) -> None:
    runner = FakeRunner(num_slots, OneToken(), overlaps_steps=overlaps_steps)
    engine = Engine(runner, 32)
    assert_runs_as_oracle(engine, calls)
    assert {step.num_tokens for step in runner.steps} <= {1}
    engine.close()


def test_toy_form_opens_a_model_by_one_line_in_the_registry(toy: None) -> None:
    texts = [([1, 5, 9, 7], [3, 4]), ([1, 5, 9, 8], [6])]
    with olive_ext.open(genai_export("llama")) as session:
        scores = [score for output in session.loglikelihood(texts) for score in output.token_logprobs]
        facts = session.describe_execution()
        assert (facts["scoring"], facts["scoring_reason"], facts["batching"]) == ("one_token", "a toy", "one_token")
        assert session.counters.steps == session.counters.tokens_fed
    FORMS.remove(OneTokenOnGraph)
    with olive_ext.open(genai_export("llama")) as session:
        plain = [score for output in session.loglikelihood(texts) for score in output.token_logprobs]
    FORMS.insert(0, OneTokenOnGraph)
    np.testing.assert_allclose(scores, plain, atol=2e-5)


class RefusedOnGraph(OneTokenOnGraph):
    """The toy with an attention of more inputs than this ONNX Runtime knows of."""

    def rewrite(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ModelProto, DecoderSpec]:
        edited = ModelProto()
        edited.CopyFrom(proto)
        node = next(node for node in edited.graph.node if node.op_type == "GroupQueryAttention")
        node.input.extend([""] * 30 + [node.input[0]])
        return edited, spec


def test_a_rewritten_graph_that_onnxruntime_refuses_opens_the_next_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """PagedAttention has fewer inputs before ONNX Runtime 1.30; the reason names the release and what it refuses."""
    monkeypatch.setattr("olive_ext.engine.forms.registry.FORMS", [RefusedOnGraph, *FORMS])
    with olive_ext.open(genai_export("llama")) as session:
        facts = session.describe_execution()
    assert facts["scoring"] != "one_token"
    (note,) = (note for note in facts["notes"] if "refuses the rewritten graph" in note)
    assert ort.__version__ in note
    assert "not in range" in note


def test_steps_that_a_kernel_is_not_known_to_survive_are_refused_by_name() -> None:
    """On the device whose kernel is reported to crash, with a number of the user's, where packed steps are possible."""
    for scoring, chunk_size, is_refused in (("auto", 2048, True), ("auto", 1024, False), ("rows", 2048, False)):
        model = _model(scoring=scoring, chunk_size=chunk_size)
        kv = tuple(replace(tensor, elem_type=10) for tensor in model.spec.kv)
        on_cuda = replace(model, session_providers=(Provider("CUDAExecutionProvider", "cuda"),))
        vars(on_cuda)["spec"] = replace(model.spec, kv=kv)
        if not is_refused:
            choose(on_cuda)
            continue
        with refused(ConfigError, "wrong_value", "engine.chunk_size", 2048, holds="1024"):
            choose(on_cuda)


def test_whole_texts_over_a_paged_cache_are_as_long_as_its_kernel_survives() -> None:
    """A trial may find that a package with a paged cache is to be fed whole: then there is no chunk to be cut."""
    model = replace(_model(), session_providers=(Provider("CUDAExecutionProvider", "cuda"),))
    paged = replace(model.spec, inputs=(replace(model.spec.inputs[0], role=Role.BLOCK_TABLE), *model.spec.inputs[1:]))
    assert paged.is_paged
    for whole, length, is_refused in ((True, 4096, True), (True, 1024, False), (False, 4096, False)):
        vars(model)["spec"] = replace(paged, context_length=length, is_splittable=not whole)
        if is_refused:
            with refused(ConfigError, "wrong_value", holds=("max_length", "4096", "1024")):
                choose(model)
        else:
            assert isinstance(choose(model)[0], PackedOnGraph)


def test_items_over_a_paged_cache_have_no_more_tokens_than_its_kernel_survives() -> None:
    """An item is fed in one step, however long chunks are; a lower limit of the user's own stays."""
    model = _model()
    limit = item_limit(model, 1024, PackedSteps(longest_step=1024).longest_step)
    assert limit.tokens == 1024
    assert "'engine.scoring' = \"rows\"" in limit.reason
    assert item_limit(model, 1024, ViewKv.form.longest_step).tokens is None
    assert item_limit(_model(chunk_size=512), 512, 1024).tokens == 512
    assert [longest_step(device) for device in ("cuda", "webgpu", "cpu")] == [1024, UNLIMITED, UNLIMITED]


def _model(**engine: Any) -> ResolvedModel:
    settings = {"model": genai_export("llama"), "execution_provider": "cpu", "engine": engine}
    return resolve(ModelSettings.of(settings))


@pytest.mark.parametrize(
    ("engine", "problems", "value", "reason"),
    [
        ({}, {}, "tree", "auto: until there has been enough work"),
        ({"scoring": "rows"}, {}, "rows", "engine.scoring"),
        ({"scoring": "answers"}, {}, "answers", "engine.scoring"),
        ({"shapes": "bucketed"}, {}, "answers", "tree batches have any shape, and steps have few"),
        ({}, {"tree": "planted"}, "answers", "planted;"),
    ],
)
def test_form_follows_settings_device_and_graph_and_says_why(
    engine: dict[str, Any], problems: dict[str, str], value: str, reason: str
) -> None:
    """One that failed is not asked again, and its problem is the reason."""
    decision = choose(_model(**engine), problems)[1]
    assert decision.value == value
    assert decision.reason.startswith(reason)


def test_packed_steps_are_refused_where_the_device_has_none() -> None:
    with refused(ConfigError, "wrong_value", "engine.scoring", holds="CUDA"):
        choose(_model(scoring="packed"))


@pytest.mark.parametrize(
    ("first", "second", "counts", "both"),
    [
        (PACKED, RANGE, (4, 2), RANGE),
        (PackedSteps(9), PACKED, (4, 4), PackedSteps(9)),
        (POOL, RANGE, (4, 4), POOL),
        (POOL, RANGE, (4, 2), SINGLE),
        (POOL, POOL, (4, 2), SINGLE),
        (AlikeRows(True, True), AlikeRows(True, False, True), (4, 2), AlikeRows(True)),
        (AlikeRows(True, True, True), PACKED, (4, 4), AlikeRows()),
        (AlikeRows(True), RANGE, (4, 4), SINGLE),
        (TreeForm(RANGE), TreeForm(POOL), (4, 4), TreeForm(POOL)),
        (TreeForm(RANGE), RANGE, (4, 2), RANGE),
        (replace(RANGE, answers=True), RANGE, (4, 4), RANGE),
        (replace(RANGE, answers=True), replace(POOL, answers=True), (4, 4), replace(POOL, answers=True)),
    ],
)
def test_two_forms_state_the_steps_that_both_run(
    first: StepForm, second: StepForm, counts: Sequence[int], both: StepForm
) -> None:
    assert joined(first, second, counts) == joined(second, first, counts) == both


def test_every_form_runs_its_own_steps() -> None:
    assert all(joined(form, form, (4, 4)) == form for form in STEP_FORMS)
