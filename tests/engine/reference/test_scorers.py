"""Engines beside a reference, over fake runners, against the definitions computed from both models' whole rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.engine import Engine
from olive_ext.engine.reference.kernels import Divergence
from olive_ext.engine.reference.recorded import RecordedRunner, RecordingRunner
from olive_ext.engine.reference.resident import PairRunner
from olive_ext.engine.reference.scorers import ComparingEngine, RecordedScorer, RecordingScorer, SharingEngine, Turns
from olive_ext.engine.requests import Generation, Request, Result, Source, join_compared
from olive_ext.engine.runners.ort.kv.base import Device
from olive_ext.engine.step import Batching, Step, StepOutput
from olive_ext.errors import ConfigError, MemoryShortageError, RecordsError
from olive_ext.model.types import SourceKind
from olive_ext.records import Form, Records
from tests.engine.fake_runner import VOCAB, FakeRunner, log_softmax, logits_of, oracle

TOKENS = st.lists(st.integers(0, 3), min_size=2, max_size=20)
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


DIVERGENCE = Divergence(open_graph, Device("cpu"))


def pair_of(
    candidate: FakeRunner, reference: FakeRunner, chunk_size: int = 8
) -> tuple[ComparingEngine, SharingEngine, Engine]:
    """A comparing engine, and one over its reference alone; the engine that compares."""
    turns = Turns()
    alone = Engine(candidate, chunk_size)
    both = Engine(PairRunner(candidate, reference, DIVERGENCE), chunk_size, counters=alone.counters)
    compared = SharingEngine(both, turns)
    engine = ComparingEngine(SharingEngine(alone, turns), compared, compared)
    return engine, SharingEngine(Engine(reference, chunk_size), turns), both


def expected(request: Request) -> dict[str, np.ndarray]:
    """The fields of `Compared`, from the definitions."""
    found: dict[str, list[object]] = {}
    first = len(request.tokens) - request.num_targets
    for place in range(first, len(request.tokens)):
        prefix, target = list(request.tokens[:place]), request.tokens[place]
        p = log_softmax(logits_of(prefix, request.source))
        q = log_softmax(Nudged(1, Batching.SINGLE).logits(prefix, request.source))
        values = {
            "kl": (np.exp(p) * (p - q)).sum(),
            "reference_logprobs": p[target],
            "reference_is_greedy": p.argmax() == target,
            "same_top": p.argmax() == q.argmax(),
            "reference_top_logprobs": p.max(),
            "top_logprobs": q[p.argmax()],
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
        for name, values in expected(request).items():
            if name != "kl" or is_exact:
                np.testing.assert_allclose(getattr(found, name), values, atol=3e-6, err_msg=name)
        if is_exact:
            np.testing.assert_array_equal(found.kl_lower, found.kl)
            assert not found.kl_variance.any()
            assert not found.tail_mass.any()


@st.composite
def scored(draw: st.DrawFn) -> list[Request]:
    texts = draw(st.lists(TOKENS, min_size=1, max_size=8))
    return [Request(tuple(tokens), draw(st.integers(1, len(tokens) - 1))) for tokens in texts]


@given(
    requests=scored(),
    batchings=st.tuples(st.sampled_from(Batching), st.sampled_from(Batching)),
    slots=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    trunks=st.tuples(st.booleans(), st.booleans()),
    chunk_size=st.integers(1, 20),
)
def test_pair_equals_the_definitions_whatever_both_runners_can_do(
    requests: list[Request],
    batchings: tuple[Batching, Batching],
    slots: tuple[int, int],
    trunks: tuple[bool, bool],
    chunk_size: int,
) -> None:
    candidate = Nudged(slots[0], batchings[0], has_tree_batches=trunks[0])
    reference = FakeRunner(slots[1], batchings[1], has_tree_batches=trunks[1])
    engine, _, _ = pair_of(candidate, reference, chunk_size)
    assert_compared(requests, engine.run(requests))
    assert candidate.steps == reference.steps


def test_pair_is_as_weak_as_the_weaker_one() -> None:
    strong = Nudged(4, Batching.PACKED, 100, has_tree_batches=True)
    weak = FakeRunner(2, Batching.SINGLE, 50, can_rewind=False, chunked_prefill=False)
    for pair in (PairRunner(strong, weak, DIVERGENCE), PairRunner(weak, strong, DIVERGENCE)):
        assert (pair.batching, pair.num_slots, pair.context_length) == (Batching.SINGLE, 2, 50)
        assert not pair.can_rewind
        assert not pair.chunked_prefill
        assert not pair.has_tree_batches
    pool, rows = FakeRunner(4, Batching.POOL), FakeRunner(2, Batching.RANGE)
    assert PairRunner(pool, FakeRunner(4, Batching.PACKED), DIVERGENCE).batching is Batching.POOL
    assert PairRunner(pool, rows, DIVERGENCE).batching is Batching.SINGLE
    assert PairRunner(rows, FakeRunner(4, Batching.PACKED), DIVERGENCE).batching is Batching.RANGE


def test_a_model_beside_itself_has_no_divergence() -> None:
    engine, _, _ = pair_of(FakeRunner(2, Batching.RANGE), FakeRunner(2, Batching.RANGE))
    (result,) = engine.run([Request((1, 2, 3, 1, 2), 4)])
    found = join_compared([Request((1, 2, 3, 1, 2), 4)], [result])
    assert found is not None
    assert found.kl.tolist() == [0.0] * 4
    assert found.same_top.all()


def test_models_with_other_encoders_or_vocabularies_are_refused() -> None:
    speech = FakeRunner(1, Batching.SINGLE)
    speech.source_kind = SourceKind.FEATURES  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"the reference's encoder takes features and the model's none"):
        PairRunner(FakeRunner(1, Batching.SINGLE), speech, DIVERGENCE)
    rows = np.zeros((2, 5), np.float32)
    ids = np.zeros(2, np.int64)
    with pytest.raises(ConfigError, match="the reference has logits for 5 tokens and the model for 6"):
        DIVERGENCE.compare(rows, np.zeros((2, 6), np.float32), ids, ids)


def test_scores_and_tokens_are_the_candidates_and_the_reference_does_not_generate() -> None:
    candidate, reference = Nudged(3, Batching.RANGE), FakeRunner(3, Batching.RANGE)
    engine, beside, _ = pair_of(candidate, reference)
    requests = [Request((1, 2, 3), 2), Request((1, 2), generation=Generation(5)), Request((2, 3, 1), 1)]
    seen: list[int] = []
    results = engine.run(requests, lambda index, _: seen.append(index))
    assert sorted(seen) == [0, 1, 2]
    alone = Engine(Nudged(3, Batching.RANGE), 8).run(requests)
    assert [(r.logprobs, r.is_greedy, r.tokens) for r in results] == [
        (r.logprobs, r.is_greedy, r.tokens) for r in alone
    ]
    assert results[1].notes is None
    assert len(candidate.steps) > len(reference.steps)
    (answer,) = beside.run([requests[1]])
    assert answer == oracle(requests[1])
    assert dict(engine.run_continuous([("a", requests[1])]))["a"].tokens == alone[1].tokens
    assert engine.counters.requests == 4


def test_engines_that_share_a_runner_do_not_trust_what_another_left_there() -> None:
    candidate, reference = Nudged(2, Batching.RANGE), FakeRunner(2, Batching.RANGE)
    engine, beside, _ = pair_of(candidate, reference)
    first, second = Request((1, 2, 3, 0, 1), 3), Request((1, 2, 3, 3, 3), 3)
    for _ in range(2):
        assert_compared([first], engine.run([first]))
        assert beside.run([second])[0].logprobs == pytest.approx(oracle(second).logprobs, abs=1e-5)
        engine.run([Request((3, 3), generation=Generation(4))])
        assert_compared([second], engine.run([second]))


def test_closing_closes_both() -> None:
    candidate, reference = Nudged(2, Batching.RANGE), FakeRunner(2, Batching.RANGE)
    engine, _, _ = pair_of(candidate, reference)
    engine.run([Request((1, 2), 1)])
    engine.close()
    assert candidate._kv == []
    assert reference._kv == []


def record(folder: Path, form: Form, requests: Sequence[Request], runner: FakeRunner | None = None) -> Records:
    reference = runner or FakeRunner(3, Batching.RANGE, has_tree_batches=True)
    with Records.write(folder, form, {"model": "fake"}) as records:
        scorer = RecordingScorer(Engine(RecordingRunner(reference, records, DIVERGENCE), 8), records)
        results = scorer.run(requests)
        assert [(r.logprobs, r.is_greedy) for r in results] == [
            (pytest.approx(e.logprobs, abs=1e-5), e.is_greedy) for e in map(oracle, requests)
        ]
        assert all(result.notes is None for result in results)
    return Records.read(records.folder)


def compare(records: Records, requests: Sequence[Request]) -> list[Result]:
    runner = Nudged(3, Batching.RANGE, has_tree_batches=True)
    return RecordedScorer(Engine(RecordedRunner(runner, records, DIVERGENCE), 8), records).run(requests)


REQUESTS = [Request(tuple(int(d) for d in f"{n:04}"[::-1] * 3 if d in "0123") or (1, 2), 1) for n in range(40)]
LONGER = [Request((*request.tokens, 1, 2, 3, 0, n % 4), 4) for n, request in enumerate(REQUESTS)]


def test_whole_records_give_what_a_pair_gives(tmp_path: Path) -> None:
    records = record(tmp_path, WHOLE, LONGER)
    assert_compared(LONGER, compare(records, LONGER))


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


def test_a_reference_against_its_own_records_has_no_divergence(tmp_path: Path) -> None:
    for form in (WHOLE, SHORT):
        records = record(tmp_path, form, LONGER)
        same = FakeRunner(3, Batching.RANGE)
        scorer = RecordedScorer(Engine(RecordedRunner(same, records, DIVERGENCE), 8), records)
        found = join_compared(LONGER, scorer.run(LONGER))
        assert found is not None
        np.testing.assert_allclose(found.kl, 0, atol=1e-7)


def test_distributions_that_requests_share_are_recorded_once(tmp_path: Path) -> None:
    choices = [Request((1, 2, 3, token), 1) for token in range(4)]
    assert record(tmp_path, SHORT, choices).describe()["positions"] == 1


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    record(tmp_path, SHORT, LONGER[:20])
    runner = FakeRunner(3, Batching.RANGE)
    records = record(tmp_path, SHORT, LONGER, runner)
    fed = sum(len(row.tokens) for step in runner.steps for row in step.rows)
    assert 0 < fed <= sum(len(request.tokens) for request in LONGER[20:])
    again = FakeRunner(3, Batching.RANGE)
    record(tmp_path, SHORT, LONGER, again)
    assert again.steps == []
    assert_compared(LONGER, compare(records, LONGER), is_exact=False)


def test_an_interrupted_recording_keeps_what_was_complete(tmp_path: Path) -> None:
    class Failing(FakeRunner):
        def run(self, step):  # type: ignore[no-untyped-def]
            if len(self.steps) == 10:
                raise KeyboardInterrupt
            return super().run(step)

    with pytest.raises(KeyboardInterrupt):
        record(tmp_path, SHORT, LONGER, Failing(1, Batching.SINGLE))
    (folder,) = tmp_path.iterdir()
    kept = Records.read(folder).num_requests
    assert 0 < kept < len(LONGER)
    assert_compared(LONGER, compare(record(tmp_path, SHORT, LONGER), LONGER), is_exact=False)


def test_a_request_that_is_not_recorded_is_refused(tmp_path: Path) -> None:
    records = record(tmp_path, SHORT, LONGER[:10])
    with pytest.raises(
        RecordsError, match=r"hold nothing of 30 of 40 requests: record the reference on the same tasks"
    ):
        compare(records, LONGER)
    other = Request(LONGER[0].tokens, LONGER[0].num_targets - 1)
    with pytest.raises(RecordsError, match="1 of 1 requests"):
        compare(records, [other])


def test_records_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    records = record(tmp_path, SHORT, LONGER[:2])
    wide = np.zeros((1, VOCAB + 1), np.float32)
    with pytest.raises(ConfigError, match=f"the reference has logits for {VOCAB} tokens and the model for {VOCAB + 1}"):
        DIVERGENCE.compare_recorded(records.get(np.array([0])), SHORT, wide, np.zeros(1, np.int64))


def test_rows_on_a_device_and_on_the_host_are_compared_alike_in_blocks() -> None:
    vocab_size, num_rows = 50_000, 50
    rng = np.random.default_rng(1)
    reference = rng.standard_normal((num_rows, vocab_size)).astype(np.float32) * 3
    candidate = reference + rng.standard_normal((num_rows, vocab_size)).astype(np.float32) / 5
    ids = reference.argmax(-1), candidate.argmax(-1)
    on_host = DIVERGENCE.compare(reference, candidate, *ids)
    values = [ort.OrtValue.ortvalue_from_numpy(rows) for rows in (reference, candidate)]
    on_device = DIVERGENCE.compare(*values, *ids)
    assert on_host["kl"].shape == (num_rows,)
    for name, array in on_host.items():
        np.testing.assert_array_equal(array, on_device[name])
    p, q = np.array([log_softmax(row) for row in reference]), np.array([log_softmax(row) for row in candidate])
    np.testing.assert_allclose(on_host["kl"], (np.exp(p) * (p - q)).sum(-1), atol=2e-6)


def test_steps_are_halved_on_both_where_one_has_no_memory_for_them() -> None:
    class Small(FakeRunner):
        def run(self, step: Step) -> StepOutput:
            if sum(len(row.tokens) for row in step.rows) > 4:
                raise MemoryShortageError("no memory")
            return super().run(step)

    class SmallNudged(Small, Nudged):
        pass

    for candidate, reference in [
        (Nudged(2, Batching.RANGE, has_tree_batches=True), Small(2, Batching.RANGE, has_tree_batches=True)),
        (SmallNudged(2, Batching.RANGE, has_tree_batches=True), FakeRunner(2, Batching.RANGE, has_tree_batches=True)),
    ]:
        engine, _, _ = pair_of(candidate, reference, chunk_size=16)
        for _ in range(2):
            assert_compared(LONGER, engine.run(LONGER))
        assert engine.counters.steps_halved > 0
