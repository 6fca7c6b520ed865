"""Forms of a step: one that is added by one class and one line, which form a model is opened with, what two share.
Short answers that share steps over the fake runner: results, how many steps, what is copied; and the rule. Slots of a
returned cache hold what was fed to each, however rows come together and part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.engine.engine import Engine, item_limit
from olive_ext.engine.forms.kv_store import KvPlace, KvStore, OpenedDecoder
from olive_ext.engine.forms.packed import PackedOnGraph, PackedSteps, longest_step
from olive_ext.engine.forms.registry import FORMS, choose
from olive_ext.engine.forms.returned import AlikeRows, ReturnedKv
from olive_ext.engine.forms.rows import RowsOnGraph, ViewKv, choose_limit
from olive_ext.engine.requests import Request
from olive_ext.engine.runners.runner import ReadySequences, ScoredSteps, ScoringRule, StepForm, joined
from olive_ext.engine.scheduling.sequences import ChosenRow
from olive_ext.engine.step import UNLIMITED, Copy, Row
from olive_ext.errors import ConfigError
from olive_ext.graph.nodes import ModelProto
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.decisions import Decision
from olive_ext.model.providers.devices import Device, Provider
from olive_ext.model.types import DecoderSpec, KvTensor, Role, StateTensor, TensorSpec
from tests.engine.fake_runner import FORMS as STEP_FORMS
from tests.engine.fake_runner import PACKED, POOL, RANGE, SINGLE, FakeRunner
from tests.engine.strategies import assert_runs_as_oracle, questions, requests_of
from tests.exports import genai_export
from tests.graph.text import model_from, session_of
from tests.refusals import refused


@dataclass(frozen=True)
class OneToken(StepForm):
    """A toy: a step has one row of one token."""

    name: ClassVar[str] = "one_token"

    def next_rows(self, ready: ReadySequences) -> list[ChosenRow]:
        return [(ready.sequences[0], ready.row(ready.sequences[0], 1))]

    def scored_steps(self, rule: ScoringRule) -> ScoredSteps:
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
        vars(model)["spec"] = replace(paged, context_length=length, alone="a trial" if whole else "")
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
        ({}, {}, "tree", "auto: where that is cheaper by rule"),
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
        (RANGE, RANGE, (4, 2), RANGE),
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


BATCHING = pytest.mark.parametrize("batching", [RANGE, POOL])


@BATCHING
@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_answers_of_many_questions_fill_steps_of_one_token_each(batching: StepForm, overlaps_steps: bool) -> None:
    requests = questions(24, answers=8, tokens=4)
    counts = {}
    for answer_steps in (False, True):
        runner = FakeRunner(16, batching, answer_steps=answer_steps, overlaps_steps=overlaps_steps)
        engine = Engine(runner, 128)
        assert_runs_as_oracle(engine, [requests])
        assert engine.counters.tokens_fed <= 1.01 * engine.counters.tokens_distinct
        counts[answer_steps] = engine.counters.steps
        engine.close()
    assert counts[False] == 24 * 8
    full = 24 + 24 * 7 * 3 / 16  # a step for each question, and steps in which every slot has an answer
    assert counts[True] <= 1.2 * full
    assert engine.describe()["scoring"] == "answers"


def test_rule_takes_short_answers_and_leaves_long_ones_alone() -> None:
    limit, _ = choose_limit([150] * 50 + [4] * 450, 16)
    assert limit == 4
    assert choose_limit([150] * 50 + [40] * 450, 16)[0] == 0
    assert choose_limit([150] * 50 + [4] * 450, 2)[0] == 0


FLOAT = TensorProto.FLOAT
SLOTS = 12


STORE = """
store (float[B, S] ids, float[B, 1, P, 1] past, float[B, 2] sum)
=> (float[B, 1, T, 1] present, float[B, 2] new_sum) {
    new = Unsqueeze (ids, middle) present = Concat <axis = 2> (past, new)
    none = Mul (ids, zero) ones = Add (none, one)
    count = ReduceSum <keepdims = 1> (ones, last) total = ReduceSum <keepdims = 1> (ids, last)
    added = Concat <axis = 1> (count, total) new_sum = Add (sum, added)
}
"""
"""Keys are the tokens, appended; the state is their number and sum, of the tokens fed and those before."""


def _store(has_state: bool) -> tuple[ReturnedKv, ort.InferenceSession]:
    numbers = {"zero": np.float32(0), "one": np.float32(1)}
    session = session_of(model_from(STORE, middle=[1, 3], last=[1], **numbers))
    logits = TensorSpec("logits", FLOAT, ("B", "S", 8))
    states = (StateTensor("sum", "new_sum", FLOAT, (2,)),) if has_state else ()
    spec = DecoderSpec((), (KvTensor("past", "present", FLOAT, 1, 1),), logits, 8, 99, False, states)
    store = ReturnedKv(KvPlace(session, spec, SLOTS, Device("cpu"), ort.InferenceSession))
    store.pad_in_front(True)
    store.reserve(99)
    return store, session


def _feed(store: ReturnedKv, session: ort.InferenceSession, rows: list[Row], has_state: bool) -> None:
    binding = store.bind(rows)
    binding.bind_cpu_input("ids", np.array([row.tokens for row in rows], np.float32))
    if not has_state:
        binding.bind_cpu_input("sum", np.zeros((len(rows), 2), np.float32))
    session.run_with_iobinding(binding)
    presents = binding.get_outputs()
    store.collect(rows, presents)
    for place, row in enumerate(rows):
        tokens = CONTENT[row.slot][: row.past] = [*CONTENT[row.slot][: row.past], *row.tokens]
        CONTENT[row.slot] = tokens
        keys = presents[0].numpy()[place, 0, :, 0]
        assert keys[len(keys) - len(tokens) :].tolist() == tokens
        if has_state:
            assert presents[1].numpy()[place].tolist() == [len(tokens), sum(tokens)]


CONTENT: list[list[int]] = []


@settings(max_examples=settings().max_examples // 2)
@given(has_state=st.booleans(), data=st.data())
def test_slots_hold_what_was_fed_to_each(has_state: bool, data: st.DataObject) -> None:
    store, session = _store(has_state)
    CONTENT[:] = [[] for _ in range(SLOTS)]
    kept: list[set[int]] = [set() for _ in range(SLOTS)]
    for _ in range(data.draw(st.integers(1, 12))):
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
        num_tokens = 1
        if data.draw(st.booleans()):  # an input, and sometimes a copy before it
            slots, num_tokens = slots[:1], data.draw(st.integers(1, 4))
            giver = data.draw(st.integers(0, SLOTS - 1))
            lengths = {0, len(CONTENT[giver])} | (kept[giver] if has_state else set(range(len(CONTENT[giver]))))
            length = data.draw(st.sampled_from(sorted(lengths)))
            if giver != slots[0] and length:
                store.copy([Copy(giver, slots[0], length)])
                CONTENT[slots[0]], kept[slots[0]] = CONTENT[giver][:length], {length}
        is_kept = data.draw(st.booleans())
        rows = [
            Row(
                slot, len(CONTENT[slot]), tuple(data.draw(st.lists(st.integers(1, 7), min_size=n, max_size=n))), is_kept
            )
            for slot in sorted(slots)
            for n in [num_tokens]
        ]
        _feed(store, session, rows, has_state)
        for row in rows:
            kept[row.slot] |= {len(CONTENT[row.slot])} if is_kept else set()
