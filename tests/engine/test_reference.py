"""Engines beside a reference, over fake runners, against the definitions computed from both models' whole rows."""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.reference import DivergenceKernels, ReadingTap, ResidentTap, WritingTap
from olive_ext.engine.requests import Generation, Request, Result, join_compared
from olive_ext.engine.runners.runner import OpenedRunner, StepForm
from olive_ext.engine.step import UNLIMITED
from olive_ext.errors import ConfigError, OliveExtError, RecordsError, UnsupportedError
from olive_ext.media.items import Source
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import SourceKind
from olive_ext.records import Form, Records
from tests.engine.fake_runner import (
    FORMS,
    POOL,
    RANGE,
    SINGLE,
    VOCAB,
    FakeRunner,
    log_softmax,
    logits_of,
    oracle,
)
from tests.engine.strategies import SOURCES, assert_equal, texts
from tests.refusals import refused

WHOLE = Form(VOCAB, 0, 0)
SHORT = Form(VOCAB, 3, 6)


class Nudged(FakeRunner):
    """A candidate: the reference's logits with noise."""

    def logits(self, prefix: Sequence[int], source: Source | None = None) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(np.array(prefix, np.int64).tobytes(), 77))
        return logits_of(prefix, source) + rng.normal(size=VOCAB).astype(np.float32) / 3


def open_graph(graph: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


DIVERGENCE = DivergenceKernels(open_graph, Device("cpu"))


def compared_engine(candidate: FakeRunner, reference: FakeRunner, chunk_size: int = 8) -> Engine:
    """An engine that compares with a resident reference."""
    tap = ResidentTap(OpenedRunner(candidate, chunk_size), OpenedRunner(reference, chunk_size), DIVERGENCE)
    return Engine(candidate, chunk_size, tap=tap)


def pair_of(candidate: FakeRunner, reference: FakeRunner, chunk_size: int = 8) -> tuple[Engine, Engine]:
    """An engine that compares with a resident reference, and one that runs that reference alone."""
    return compared_engine(candidate, reference, chunk_size), Engine(reference, chunk_size)


def writing_engine(reference: FakeRunner, records: Records) -> Engine:
    return Engine(reference, 8, tap=WritingTap(records, DIVERGENCE))


def reading_engine(candidate: FakeRunner, records: Records) -> Engine:
    return Engine(candidate, 8, tap=ReadingTap(records, DIVERGENCE))


def expected(request: Request, *, is_whole: bool = True) -> dict[str, np.ndarray]:
    """The fields of `Compared`, from the definitions."""
    found: dict[str, list[object]] = {}
    first = len(request.tokens) - request.num_targets
    for place in range(first, len(request.tokens)):
        prefix, target = list(request.tokens[:place]), request.tokens[place]
        p = log_softmax(logits_of(prefix, request.source))
        q = log_softmax(Nudged(1, SINGLE).logits(prefix, request.source))
        values = {
            "kl": (np.exp(p) * (p - q)).sum(),
            "kl_reverse": (np.exp(q) * (q - p)).sum() if is_whole else math.nan,
            "reference_logprobs": p[target],
            "reference_is_greedy": p.argmax() == target,
            "same_top": p.argmax() == q.argmax(),
            "reference_top_logprobs": p.max(),
            "top_logprobs": q[p.argmax()],
            "logprobs": q[target],
            "targets": target,
            "positions": place,
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: np.array(values) for name, values in found.items()}


def assert_compared(requests: Sequence[Request], results: Sequence[Result], *, is_exact: bool = True) -> None:
    for request, result in zip(requests, results, strict=True):
        found = join_compared([request], [result])
        assert found is not None
        assert len(found) == request.num_targets
        values_of = expected(request, is_whole=is_exact)
        assert result.logprobs == pytest.approx(values_of.pop("logprobs"), abs=3e-6)
        for name, values in values_of.items():
            if name != "kl" or is_exact:
                np.testing.assert_allclose(getattr(found, name), values, atol=3e-6, err_msg=name)
        if is_exact:
            np.testing.assert_array_equal(found.kl_lower, found.kl)
            assert not found.kl_variance.any()
            assert not found.tail_mass.any()


@st.composite
def scored(draw: st.DrawFn, sources: Sequence[Source | None] = SOURCES[:1]) -> list[Request]:
    asked = draw(st.lists(st.tuples(texts(2, 20), st.integers(0, 18)), min_size=1, max_size=8))
    return [
        Request(tuple(tokens), 1 + targets % (len(tokens) - 1), source=sources[targets % len(sources)])
        for tokens, targets in asked
    ]


MEMORY = st.one_of(st.just(UNLIMITED), st.integers(1, 30))


@settings(max_examples=2 * settings().max_examples)
@given(
    data=st.data(),
    batchings=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    slots=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    trunks=st.tuples(st.booleans(), st.booleans()),
    most=st.tuples(MEMORY, MEMORY),
    chunk_size=st.integers(1, 20),
)
def test_pair_equals_the_definitions_whatever_both_runners_can_do(
    data: st.DataObject,
    batchings: tuple[StepForm, StepForm],
    slots: tuple[int, int],
    trunks: tuple[bool, bool],
    most: tuple[int, int],
    chunk_size: int,
) -> None:
    """Steps are the same for both; those without memory on either model are halved on both. Texts after the sources of
    an encoder are in no tree."""
    calls = data.draw(st.lists(scored(SOURCES[:1] if all(trunks) else SOURCES), min_size=1, max_size=3))
    candidate = Nudged(slots[0], batchings[0], has_tree_batches=trunks[0], most_tokens=most[0])
    reference = FakeRunner(slots[1], batchings[1], has_tree_batches=trunks[1], most_tokens=most[1])
    engine = compared_engine(candidate, reference, chunk_size)
    for requests in calls:
        assert_compared(requests, engine.run(requests))
    assert candidate.steps == reference.steps or min(most) < UNLIMITED
    longest = [max(step.num_tokens for step in runner.steps) for runner in (candidate, reference)]
    assert max(longest) <= max(most)
    assert min(longest) <= min(most)


def test_pools_of_which_one_loses_slots_on_the_way_run_single_rows() -> None:
    class Halving(FakeRunner):
        """Has memory for one slot only where slots are longer than 20 positions."""

        def reserve(self, positions: int, cells: int = 0) -> None:
            if positions > 20:
                self.capacity = self.capacity._replace(num_slots=1)
            super().reserve(positions, cells)

    longest = Request((0, 1, 2, 3) * 8, 3)
    candidate, reference = Nudged(3, POOL), Halving(3, POOL)
    engine = compared_engine(candidate, reference)
    for requests in (LONGER[:9], [longest, *LONGER], LONGER):
        assert_compared(requests, engine.run(requests))
    assert reference.capacity.num_slots == 1


def test_models_with_other_encoders_or_vocabularies_are_refused() -> None:
    speech = FakeRunner(1, SINGLE)
    speech.encoder = SimpleNamespace(kind=SourceKind.FEATURES)
    with refused(ConfigError, "not_comparable"):
        ResidentTap(OpenedRunner(FakeRunner(1, SINGLE), 8), OpenedRunner(speech, 8), DIVERGENCE)
    whole = FakeRunner(1, SINGLE, chunked_prefill=False)
    with refused(UnsupportedError, "unsupported", "reference.mode", "resident"):
        compared_engine(FakeRunner(1, SINGLE), whole, chunk_size=1)
    rows = np.zeros((2, 5), np.float32)
    ids = np.zeros(2, np.int64)
    with refused(ConfigError, "not_comparable", holds=("5", "6")):
        DIVERGENCE.compare(rows, np.zeros((2, 6), np.float32), ids, ids)
    padded = np.pad(rows, ((0, 0), (0, 1)), constant_values=-1e4)
    found = DivergenceKernels(open_graph, Device("cpu"), 5).compare(rows, padded, ids, ids)
    assert not found["kl"].any()


def record(folder: Path, form: Form, requests: Sequence[Request], runner: FakeRunner | None = None) -> Records:
    reference = runner or FakeRunner(3, RANGE, has_tree_batches=True)
    with closing(Records.write(folder, form, {"model": "fake"})) as records:
        results = writing_engine(reference, records).run(requests)
        assert [(r.logprobs, r.is_greedy) for r in results] == [
            (pytest.approx(e.logprobs, abs=1e-5), e.is_greedy) for e in map(oracle, requests)
        ]
        assert all(result.notes is None for result in results)
    return Records.read(records.folder)


def compare(records: Records, requests: Sequence[Request]) -> list[Result]:
    runner = Nudged(3, RANGE, has_tree_batches=True)
    return reading_engine(runner, records).run(requests)


REQUESTS = [Request(tuple(int(d) for d in f"{n:04}"[::-1] * 3 if d in "0123") or (1, 2), 1) for n in range(40)]
LONGER = [Request((*request.tokens, 1, 2, 3, 0, n % 4), 4) for n, request in enumerate(REQUESTS)]


def test_short_records_estimate_without_bias_and_bound_from_below(tmp_path: Path) -> None:
    records = record(tmp_path, SHORT, LONGER)
    results = compare(records, LONGER)
    assert_compared(LONGER, results, is_exact=False)
    found = join_compared(LONGER, results)
    assert found is not None
    exact = np.concatenate([expected(request)["kl"] for request in LONGER])
    error = np.sqrt(found.kl_variance.sum()) / len(exact)
    assert 0 < error < 0.1 * exact.mean()
    assert abs(found.kl.mean() - exact.mean()) < 4 * error
    assert (found.kl_lower <= exact + 1e-6).all()
    assert (found.tail_mass > 0).all()


def test_distributions_that_requests_share_are_recorded_once(tmp_path: Path) -> None:
    choices = [Request((1, 2, 3, token), 1) for token in range(4)]
    assert record(tmp_path, SHORT, choices).describe()["positions"] == 1


def test_an_interrupted_recording_keeps_what_was_complete(tmp_path: Path) -> None:
    class Failing(FakeRunner):
        def run(self, step):  # type: ignore[no-untyped-def]
            if len(self.steps) == 10:
                raise KeyboardInterrupt
            return super().run(step)

    with pytest.raises(KeyboardInterrupt):
        record(tmp_path, SHORT, LONGER, Failing(1, SINGLE))
    (folder,) = tmp_path.iterdir()
    kept = Records.read(folder).num_requests
    assert 0 < kept < len(LONGER)
    assert_compared(LONGER, compare(record(tmp_path, SHORT, LONGER), LONGER), is_exact=False)


def test_a_request_that_is_not_recorded_is_refused(tmp_path: Path) -> None:
    records = record(tmp_path, SHORT, LONGER[:10])
    with refused(RecordsError, "records", holds=("30", "40")):
        compare(records, LONGER)
    other = Request(LONGER[0].tokens, LONGER[0].num_targets - 1)
    with refused(RecordsError, "records", holds="1"):
        compare(records, [other])


@pytest.mark.parametrize("form", [SHORT, WHOLE])
def test_records_of_another_vocabulary_are_refused_unless_no_token_has_the_other_ids(
    form: Form, tmp_path: Path
) -> None:
    records = record(tmp_path, form, LONGER[:2])
    rows, ids = np.zeros((1, VOCAB), np.float32), np.zeros(1, np.int64)
    wide = np.pad(rows, ((0, 0), (0, 1)), constant_values=-1e4)
    with refused(ConfigError, "not_comparable", holds=(f"{VOCAB}", f"{VOCAB + 1}")):
        DIVERGENCE.compare_recorded(records.get(np.array([0])), form, wide, ids)
    padded, known = DivergenceKernels(open_graph, Device("cpu"), VOCAB), records.get(np.array([0]))
    as_known = DIVERGENCE.compare_recorded(known, form, rows, ids)["kl"]
    np.testing.assert_allclose(padded.compare_recorded(known, form, wide, ids)["kl"], as_known, rtol=1e-5)


USES = st.sampled_from(["score", "generate", "mixed", "reference scores", "reference generates", "continuous"])


@given(
    uses=st.lists(st.tuples(USES, scored()), min_size=2, max_size=6),
    batchings=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    slots=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    overlaps_steps=st.booleans(),
    trunk=st.booleans(),
)
def test_models_that_are_used_together_and_alone_in_any_order_forget_what_is_not_theirs(
    uses: list[tuple[str, list[Request]]],
    batchings: tuple[StepForm, StepForm],
    slots: tuple[int, int],
    overlaps_steps: bool,
    trunk: bool,
) -> None:
    candidate = Nudged(slots[0], batchings[0], has_tree_batches=trunk, overlaps_steps=overlaps_steps)
    reference = FakeRunner(slots[1], batchings[1], has_tree_batches=trunk, overlaps_steps=overlaps_steps)
    engine, beside = pair_of(candidate, reference)
    for use, requests in uses:
        generations = [Request(request.tokens, generation=Generation(4)) for request in requests]
        if use in ("score", "mixed"):
            mixed = [*requests, *(generations if use == "mixed" else ())]
            results = engine.run(mixed)
            assert_compared(requests, results[: len(requests)])
            assert [result.notes for result in results[len(requests) :]] == [None] * (len(mixed) - len(requests))
            assert [result.tokens for result in results[len(requests) :]] == [
                generated_alone(request) for request in mixed[len(requests) :]
            ]
        elif use == "generate":
            assert [result.tokens for result in engine.run(generations)] == list(map(generated_alone, generations))
        elif use == "continuous":
            found = dict(engine.run_continuous(enumerate(generations)))
            assert [found[place].tokens for place in range(len(found))] == list(map(generated_alone, generations))
        else:
            asked = requests if use == "reference scores" else generations
            for found_, request in zip(beside.run(asked), asked, strict=True):
                assert_equal(found_, oracle(request))
    engine.close()
    assert (candidate._slots, reference._slots) == ([], [])


def generated_alone(request: Request) -> tuple[int, ...]:
    """The candidate's tokens, from the definition."""
    tokens, candidate = list(request.tokens), Nudged(1, SINGLE)
    assert request.generation is not None
    for _ in range(request.generation.max_new_tokens):
        tokens.append(int(candidate.logits(tokens).argmax()))
    return tuple(tokens[len(request.tokens) :])


def test_generation_has_the_candidates_own_slots_and_length() -> None:
    candidate, reference = Nudged(4, RANGE, 60), FakeRunner(1, SINGLE, 40)
    engine = compared_engine(candidate, reference)
    assert engine.context_length == 40
    engine.run([Request((1, 2, place), generation=Generation(5)) for place in range(4)])
    assert max(len(step.rows) for step in candidate.steps) == 4
    assert reference.steps == []
    engine.run([Request((1,) * 50, generation=Generation(5))])
    with refused(OliveExtError, "unsupported", holds=("49", "40")):
        engine.run([Request((1,) * 50, 2)])


@given(first=scored(), second=scored(), form=st.sampled_from([WHOLE, SHORT]), has_tree_batches=st.booleans())
def test_a_recording_answers_what_it_knows_and_runs_the_rest(
    first: list[Request], second: list[Request], form: Form, has_tree_batches: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), form, first)
        runner = FakeRunner(2, RANGE, has_tree_batches=has_tree_batches)
        records = record(Path(folder), form, [*second, *first, *second], runner)
        fed = sum(step.num_tokens for step in runner.steps)
        assert fed <= sum(len(request.tokens) for request in second)
        assert (fed == 0) is (set(second) <= set(first))
        everything = [*first, *second]
        assert_compared(everything, compare(records, everything), is_exact=form is WHOLE)
