"""A session that keeps its answers gives the same bits whenever it is interrupted, and asks the model nothing twice."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import olive_ext
from olive_ext.engine.requests import (
    NUMBERS,
    Beams,
    FinishReason,
    Generation,
    Hypothesis,
    KeyedRequest,
    KeyedResult,
    Request,
    Result,
    Sampling,
    Suppressed,
)
from olive_ext.errors import RecordsError
from olive_ext.media.items import Source
from olive_ext.package_versions import runtimes
from olive_ext.records.journal import read_facts
from olive_ext.session.answer_journal import in_chunks, request_digest, result_from_json, result_to_json
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from olive_ext.session.session import Session
from olive_ext.stats.compared_fields import COMPARED
from tests.exports import genai_export
from tests.refusals import refused
from tests.session.fake_engine import FakeEngine
from tests.session.tiny import byte_level

numbers = st.floats(allow_nan=False, allow_infinity=False, max_value=0, width=32)


@given(logprobs=st.lists(numbers, min_size=1), tokens=st.lists(st.integers(0, 9)), is_compared=st.booleans())
def test_results_are_read_as_they_were_written(logprobs: list[float], tokens: list[int], is_compared: bool) -> None:
    notes = np.zeros(len(logprobs), COMPARED) if is_compared else None
    if notes is not None:
        notes["kl"] = logprobs
    for result in (
        Result(tuple(logprobs), tuple(value > 0 for value in logprobs), notes=notes),
        Result(tokens=tuple(tokens), finish_reason=FinishReason.STOP_ID, stop_id=3),
        Result(tuple(logprobs), (True,) * len(logprobs), tuple(tokens), FinishReason.LENGTH),
        Result(tokens=tuple(tokens), finish_reason=FinishReason.STOP_ID, stop_id=3, hypotheses=_hypotheses(tokens)),
    ):
        made = Generation(max(1, len(tokens) + 1)) if result.finish_reason is not FinishReason.SCORED else None
        request = Request((1,) * (len(result.logprobs) + 1), len(result.logprobs), made)
        again = result_from_json(result_to_json(result), request)
        assert again == result
        assert (again.notes is None) == (result.notes is None)
        if again.notes is not None:
            assert again.notes.tobytes() == result.notes.tobytes()


SCORED = Request((1, 2, 3), 2)
GENERATED = Request((1, 2), 0, Generation(2))


@pytest.mark.parametrize(
    ("request_", "written_"),
    [
        (SCORED, None),
        (SCORED, []),
        (SCORED, {}),
        (SCORED, {"logprobs": [-1.0], "is_greedy": [1]}),
        (SCORED, {"logprobs": [-1.0, float("nan")], "is_greedy": [1, 0]}),
        (SCORED, {"logprobs": [-1.0, float("-inf")], "is_greedy": [1, 0]}),
        (SCORED, {"logprobs": [-1.0, 2.0], "is_greedy": [1, 0]}),
        (SCORED, {"logprobs": [-1.0, 10**400], "is_greedy": [1, 0]}),
        (SCORED, {"logprobs": {"a": 1}, "is_greedy": [1, 0]}),
        (SCORED, {"logprobs": [-1.0, -1.0], "is_greedy": [1, 0], "compared": "AAAA"}),
        (SCORED, {"logprobs": [-1.0, -1.0], "is_greedy": [1, 0], "compared": "\u00e9"}),
        (SCORED, {"logprobs": [-1.0, -1.0], "is_greedy": [1, 0], "more": 1}),
        (GENERATED, {"tokens": [1, 2, 3], "finish_reason": "length"}),
        (GENERATED, {"tokens": [-1], "finish_reason": "length"}),
        (GENERATED, {"tokens": [2**31], "finish_reason": "length"}),
        (GENERATED, {"tokens": [1], "finish_reason": "no"}),
        (GENERATED, {"tokens": [1], "finish_reason": "length", "hypotheses": [{"tokens": [1]}]}),
        (GENERATED, {"tokens": [1], "finish_reason": "length", "hypotheses": [{"score": float("nan")}]}),
    ],
)
def test_what_is_no_answer_to_the_request_is_not_read(request_: Request, written_: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        result_from_json(written_, request_)


def test_a_forged_answer_ends_in_an_error_that_names_the_journal(tmp_path: Path) -> None:
    session = Session(FakeEngine(), byte_level())
    session.keep_answers(tmp_path / "answers")
    session.loglikelihood([([5, 6], [7])])
    path = session.journal.path
    assert read_facts(path)["versions"] == runtimes(), "another release's answers are others"
    session.keep_answers(None)
    facts, line = path.read_bytes().splitlines(keepends=True)
    body = line[9:-1].replace(b'"logprobs":[', b'"logprobs":["x",')
    path.write_bytes(facts + b"%08x %s\n" % (zlib.crc32(body), body))
    session.keep_answers(tmp_path / "answers")
    with refused(RecordsError, "records", holds="logprobs"):
        session.loglikelihood([([5, 6], [7])])


class _Roomy(FakeEngine):
    """Has so many positions for all slots together."""

    def __init__(self, slot_positions: int, is_deterministic: bool) -> None:
        super().__init__()
        self._facts = {"slot_positions": slot_positions, "deterministic": is_deterministic}

    def describe(self) -> dict[str, Any]:
        return super().describe() | self._facts


@pytest.mark.parametrize(("is_deterministic", "num_asked"), [(False, 1), (True, 2)])
def test_answers_are_resumed_whatever_memory_is_free(tmp_path: Path, is_deterministic: bool, num_asked: int) -> None:
    """What is free differs from call to call; where bits are to repeat, half of all memory decides them."""
    engines = [_Roomy(positions, is_deterministic) for positions in (9000, 8999)]
    for engine in engines:
        session = Session(engine, byte_level())
        session.keep_answers(tmp_path / "answers")
        session.loglikelihood([([5, 6], [7])])
        session.keep_answers(None)
    assert sum(len(engine.requests) for engine in engines) == num_asked


def _hypotheses(tokens: list[int]) -> tuple[Hypothesis, ...]:
    scores = enumerate((-0.1, -1 / 3))
    return tuple(Hypothesis((*tokens, place), score, FinishReason.STOP_ID, 3) for place, score in scores)


def test_keys_differ_where_anything_that_decides_differs() -> None:
    made = Generation(4, frozenset({1}), Sampling(), stops=("a",))
    requests = [
        Request((1, 2, 3), 1),
        Request((1, 2, 3), 2),
        Request((1, 2, 4), 1),
        Request((1, 2, 3), 1, source=Source(np.array([1]))),
        Request((1, 2, 3), 0, made),
        Request((1, 2, 3), 0, Generation(5, frozenset({1}), Sampling(), stops=("a",))),
        Request((1, 2, 3), 0, Generation(4, frozenset({2}), Sampling(), stops=("a",))),
        Request((1, 2, 3), 0, Generation(4, frozenset({1}), Sampling(1.0, seed=1), stops=("a",))),
        Request((1, 2, 3), 0, Generation(4, frozenset({1}), Sampling(1.0, seed=2), stops=("a",))),
        Request((1, 2, 3), 0, Generation(4, frozenset({1}), Sampling(), stops=("b",))),
        *(Request((1, 2, 3), 0, replace(made, beams=beams)) for beams in (Beams(2), Beams(3), Beams(2, 2.0))),
        *(
            Request((1, 2, 3), 0, replace(made, beams=Beams(2, 1.0, *rest)))
            for rest in ((True,), ("never",), (False, 2))
        ),
        *(Request((1, 2, 3), 0, replace(made, suppressed=Suppressed(*ids))) for ids in (((5,),), ((), (5,)))),
    ]
    assert len({request_digest(request) for request in requests}) == len(requests)


class EagerEngine(FakeEngine):
    """Reads so many chunks ahead, and completes the last of them first."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.ran: set[tuple[Request, ...]] = set()

    def run_slices(self, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        return in_chunks(self, slices)

    def run_chunks(self, chunks: Iterable[Sequence[KeyedRequest]]) -> Iterator[tuple[int, list[Result]]]:
        source = enumerate(chunks)
        while read := list(islice(source, self.ahead)):
            for number, items in reversed(read):
                requests = [request for _, request in items]
                assert tuple(requests) not in self.ran
                self.ran.update([tuple(requests)] if requests else [])
                yield number, [*map(self._answer, requests)]


@pytest.mark.parametrize("is_kept", [True, False])
def test_chunks_of_slices_are_the_same_however_many_are_under_way(is_kept: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pool = [(rng.integers(1, 99, 60).tolist(), [int(rng.integers(1, 99))]) for _ in range(700)]
    slices = [[pool[place] for place in rng.integers(0, len(pool), 300)] for _ in range(5)]
    ran, answered = [], []
    for ahead in (1, 3, 1000):
        engine, found = EagerEngine(ahead), dict[int, Any]()
        session = Session(engine, byte_level())
        if is_kept:
            session.keep_answers(tmp_path / str(ahead))
        found.update(session.as_completed("loglikelihood", iter(slices)))
        ran.append(engine.ran)
        answered.append(found)
    assert ran[0] == ran[1] == ran[2]
    assert len(ran[0]) > 5
    expected = dict(enumerate(Session(FakeEngine(), byte_level()).loglikelihood([*chain(*slices)])))
    assert answered == [expected] * 3


def test_another_context_length_is_another_journal(tmp_path: Path) -> None:
    for length in (64, 32, 64):
        session = Session(FakeEngine(length), byte_level())
        session.keep_answers(tmp_path / "answers")
        session.generate([GenerationRequest("a", 3)])
        session.close()
    assert len(list(tmp_path.glob("answers_*.jsonl"))) == 2


def open_tiny(**given: Any) -> Session:
    return olive_ext.open(genai_export("llama"), engine={"num_threads": 1}, deterministic=True, **given)


@pytest.fixture(scope="module")
def asked() -> tuple[list[ScoringRequest], list[GenerationRequest]]:
    rng = np.random.default_rng(0)
    stems = [tuple(rng.integers(5, 900, rng.integers(20, 200)).tolist()) for _ in range(6)]

    def context() -> tuple[int, ...]:
        return stems[rng.integers(6)] + tuple(rng.integers(5, 900, rng.integers(10, 150)).tolist())

    scored = [ScoringRequest(context(), tuple(rng.integers(5, 900, rng.integers(1, 4)).tolist())) for _ in range(150)]
    made = [
        GenerationRequest(context(), int(rng.integers(2, 9)), "a ", temperature=float(rng.integers(2)), seed=number)
        for number in range(150)
    ]
    return scored, made


Outputs = tuple[list[Any], list[Any]]


def answers(session: Session, asked: tuple[list[ScoringRequest], list[GenerationRequest]]) -> Outputs:
    return session.loglikelihood(asked[0]), session.generate(asked[1])


@pytest.fixture(scope="module")
def kept(asked: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Outputs]]:
    """A journal, and the answers in it."""
    stem = tmp_path_factory.mktemp("journal") / "answers"
    with open_tiny() as session:
        session.keep_answers(stem)
        found = answers(session, asked)
        yield session.journal.path, found


@pytest.mark.parametrize("part", [pytest.param(0.2, marks=pytest.mark.long), 0.75])
def test_bits_of_a_real_model_do_not_depend_on_where_it_was_interrupted(
    part: float, kept: tuple[Path, Outputs], asked: Any, tmp_path: Path
) -> None:
    path, expected = kept
    content = path.read_bytes()
    (tmp_path / path.name).write_bytes(content[: int(part * len(content))])
    with open_tiny() as session:
        session.loglikelihood([([7, 8, 9] * 30, [5])] * 3)  # whatever the session has done before
        session.keep_answers(tmp_path / "answers")
        assert answers(session, asked) == expected
        assert session.journal.num_known > 0
        assert session.journal.num_known + session.journal.num_written == len(asked[0]) + len(asked[1])
        assert (tmp_path / path.name).stat().st_size == len(content)


@pytest.mark.parametrize("other", [{"numbers": 1}, {"row_group": 16}, {"batching": "single"}])
def test_answers_that_were_computed_otherwise_are_not_used(
    other: dict[str, Any], kept: tuple[Path, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a version whose numbers have been mended since, or on a processor that rounds other groups of rows."""
    with open_tiny() as session:
        monkeypatch.setattr("olive_ext.session.answer_journal.NUMBERS", other.get("numbers", NUMBERS))
        execution = {**session.describe_execution(), **other}
        monkeypatch.setattr(session, "describe_execution", lambda: execution)
        session.keep_answers(kept[0].parent / "answers")
        assert session.journal.path != kept[0]
        assert session.journal.num_known == 0


def test_what_is_compared_with_a_reference_is_kept(asked: Any, tmp_path: Path) -> None:
    scored, compared = asked[0][:40], []
    for _ in range(2):
        with open_tiny(reference=genai_export("llama", precision="int4")) as session:
            session.keep_answers(tmp_path / "answers")
            compared.append([output.compared for output in session.loglikelihood(scored)])
            num_written = session.journal.num_written
    assert num_written == 0
    for one, two in zip(*compared, strict=True):
        assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in vars(one))
