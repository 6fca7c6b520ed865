"""The session over a fake engine: order, conversion, windows, callbacks, turns and closing."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.errors import ConfigError, SessionError, TaskError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest
from tests.refusals import refused
from tests.session.fake_engine import FakeEngine, naive
from tests.session.tiny import BOS, EOS, byte_level

IDS = st.lists(st.integers(5, 300), max_size=50)
TEXT = st.text(alphabet="the catso東🙂\n", max_size=30)


def make_session(answers: dict[str, str] | None = None, context_length: int = 512, **tokenizer: object) -> Session:
    encode = byte_level().encode
    tokens = {
        tuple(encode(prompt)): encode(answer, add_special_tokens=False) for prompt, answer in (answers or {}).items()
    }
    return Session(FakeEngine(context_length, tokens), byte_level(**tokenizer))


def engine_of(session: Session) -> FakeEngine:
    return session.executor


@given(pairs=st.lists(st.tuples(IDS, IDS.filter(bool)), max_size=6), max_length=st.integers(1, 30))
def test_loglikelihood_of_ids_equals_the_naive_score_over_what_fits(
    pairs: list[tuple[list[int], list[int]]], max_length: int
) -> None:
    outputs = make_session(context_length=max_length).loglikelihood(pairs)
    assert len(outputs) == len(pairs)
    for (context, target), output in zip(pairs, outputs, strict=True):
        assert output.token_count == len(output.token_logprobs) == len(target)
        assert output.logprob == math.fsum(output.token_logprobs)
        if len(target) <= max_length:
            kept = ((context or [BOS]) + target)[-(max_length + 1) :]
            expected = naive(kept[: -len(target)], target)
            assert output.token_logprobs == tuple(logprob for logprob, _ in expected)
            assert output.is_greedy == all(greedy for _, greedy in expected)


@given(texts=st.lists(TEXT, max_size=5), max_length=st.integers(1, 30))
def test_rolling_scores_each_token_once_and_not_the_bos(texts: list[str], max_length: int) -> None:
    session = make_session(context_length=max_length)
    outputs = session.loglikelihood_rolling(texts)
    ids = [byte_level().encode(text, add_special_tokens=False) for text in texts]
    assert [output.token_count for output in outputs] == [len(tokens) for tokens in ids]
    assert dict(session.as_completed("loglikelihood_rolling", [texts])) == dict(enumerate(outputs))
    if ids and len(ids[0]) <= max_length:
        assert outputs[0].logprob == pytest.approx(sum(logprob for logprob, _ in naive([BOS], ids[0])))


def test_scored_texts_and_ids_get_their_prefix() -> None:
    session, encode = make_session(), byte_level().encode
    session.loglikelihood_rolling([RollingRequest([BOS, 9, 10], prefix=7), [BOS, 9]])
    assert [request.tokens for request in engine_of(session).requests] == [(7, BOS, 9, 10), (BOS, BOS, 9)]
    assert [request.num_targets for request in engine_of(session).requests] == [3, 2]
    the = encode(" the", add_special_tokens=False)
    session.loglikelihood([("on", " the"), ScoringRequest("on", the), (encode("on"), " the"), ([], the), ("", the)])
    tokens = [request.tokens for request in engine_of(session).requests[2:]]
    assert tokens[:3] == [tuple(encode("on the"))] * 3
    assert tokens[3:] == [(BOS, *the)] * 2


def test_repr_says_model_runtime_and_device_and_whether_it_is_closed() -> None:
    engine = FakeEngine(8)
    assert repr(Session(engine, byte_level())) == "<Session of 'a model'>"
    session = Session(engine, byte_level(), facts={"model": "m.onnx", "runtime": "onnxruntime", "providers": ["CPU"]})
    assert repr(session) == "<Session of 'm.onnx': onnxruntime on CPU>"
    session.close()
    assert repr(session) == "<Session of 'm.onnx': closed>"


def test_generate_starts_an_empty_prompt_with_the_prefix_token() -> None:
    session = make_session(has_bos=False)
    session.generate([""])
    assert engine_of(session).requests[0].tokens == (EOS,)


def test_generate_cuts_a_long_prompt_on_the_left(caplog: pytest.LogCaptureFixture) -> None:
    session = make_session(context_length=10)
    long = GenerationRequest(list(range(5, 25)), max_new_tokens=4)
    asked = [long, GenerationRequest([5], max_new_tokens=9)]
    assert len(dict(session.run_slices("generate", [[*enumerate(asked)]], ["gsm8k", "mbpp"].__getitem__))) == 2
    assert engine_of(session).requests[0].tokens == tuple(range(19, 25))
    assert re.search("1 of 2 requests .* 10 tokens: 1 of gsm8k", caplog.text)


def test_close_waits_for_a_list_of_answers() -> None:
    session = make_session()
    closing = threading.Thread(target=session.close)

    def asked() -> Iterator[str]:
        yield "a"
        closing.start()
        closing.join(0.05)
        yield from ("the", "on")

    assert len(session.generate(asked())) == 3
    closing.join(10)
    assert engine_of(session).num_closed == 1


def test_requests_may_come_from_an_iterator_and_none_give_an_empty_list() -> None:
    session, texts = make_session(), ["the cat", "a dog"]
    assert session.generate(iter(texts), max_new_tokens=2) == session.generate(texts, max_new_tokens=2)
    assert session.generate([]) == session.loglikelihood([]) == session.loglikelihood_rolling([]) == []
    assert list(session.generate_continuous([])) == []


def test_generate_continuous_gives_the_session_back_when_closed_early_or_failed() -> None:
    session = make_session()
    results = session.generate_continuous(enumerate(["a", "the", "on"]))
    next(results)
    with refused(SessionError, "closed", holds="generate_continuous"):
        session.loglikelihood([("a", "b")])
    results.close()
    assert engine_of(session).num_open_iterators == 0
    with refused(ConfigError, "wrong_value", "prompt", holds="bad"):
        list(session.generate_continuous([("bad", None)]))
    assert session.loglikelihood([("a", "b")])


def test_another_thread_waits_for_its_turn() -> None:
    session = make_session()
    results = session.generate_continuous(enumerate(["a", "the", "on"]))
    next(results)
    answered: list[object] = []
    other = threading.Thread(target=lambda: answered.extend(session.loglikelihood([("a", "b")])))
    other.start()
    other.join(0.1)
    assert answered == []
    assert len(list(results)) == 2
    other.join(10)
    assert len(answered) == 1


def test_close_is_idempotent_and_a_closed_session_says_so() -> None:
    with make_session() as session:
        session.gc()
    session.close()
    engine = engine_of(session)
    assert (engine.num_closed, engine.num_resets) == (1, 1)
    for use in (
        lambda: session.generate([]),
        lambda: session.generate_continuous([]),
        lambda: session.as_completed("generate", []),
        lambda: session.loglikelihood([("a", "b")]),
        lambda: session.loglikelihood_rolling([]),
        session.gc,
        session.release_memory,
        session.describe_execution,
        lambda: session.counters,
    ):
        with refused(SessionError, "closed"):
            use()


def test_stream_reads_on_after_none_keeps_keys_that_repeat_and_released_memory_is_the_engines() -> None:
    session = make_session()
    items = [None, ("x", GenerationRequest("a", max_new_tokens=2)), None, ("x", "the")]
    assert [key for key, _ in session.generate_continuous(items)] == ["x", "x"]
    session.release_memory()
    assert engine_of(session).num_released == 1


def test_close_ends_an_open_iterator_and_lets_those_who_wait_go() -> None:
    session = make_session()
    results = session.generate_continuous(enumerate(["a", "the", "on"]))
    next(results)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            session.gc()
        except SessionError as error:
            errors.append(error)

    other = threading.Thread(target=wait)
    other.start()
    session.close()
    other.join(10)
    assert len(errors) == 1
    assert engine_of(session).num_open_iterators == 0
    with refused(SessionError, "closed"):
        next(results)
    assert list(results) == []


def test_a_call_between_outputs_is_refused_and_no_failure_there_ends_the_session() -> None:
    session = make_session()
    for failing, error in ((session.gc, SessionError), (lambda: 1 // 0, ZeroDivisionError)):
        outputs = session.as_completed("generate", [["a"]])
        next(outputs)
        with pytest.raises(error):
            failing()
        outputs.close()
        assert session.generate(["a"])


def test_a_tokenizer_without_prefix_is_named_when_one_is_needed() -> None:
    class NoPrefix:
        where = "x"
        eos_token_id = None

        @property
        def prefix_token_id(self) -> int:
            raise TaskError("neither BOS nor EOS")

    session = Session(FakeEngine(), NoPrefix())
    with refused(TaskError, "task", holds=("0", "BOS", "EOS")):
        session.loglikelihood_rolling([[5, 6]])
    assert session.loglikelihood_rolling([RollingRequest([5, 6], prefix=5)])
