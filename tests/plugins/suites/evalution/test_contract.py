"""The checklist of Evalution's guide for engines, and what its suites read beyond it, point by point. Scores and texts
are those of its own transformers engine on the same fp32 weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from evalution.engines.base import (
    BaseEngine,
    BaseInferenceSession,
    GenerationRequest,
    LoglikelihoodRequest,
    RollingLoglikelihoodRequest,
    SharedEngineConfig,
)

from olive_ext.errors import ConfigError
from olive_ext.plugins.suites.evalution import OrtEngine, OrtInferenceSession
from tests.exports import CONTEXT, TEXT
from tests.plugins.suites.evalution.local import FAMILIES, Draw, onnx_model, open_ours, theirs

pytestmark = pytest.mark.other_env

WORDS = TEXT.split()


@pytest.fixture(scope="module")
def session() -> Iterator[OrtInferenceSession]:
    session = open_ours()
    yield session
    session.close()


def generation(number: int, **fields: Any) -> GenerationRequest:
    prompt = " ".join(WORDS[number : number + 6])
    fields = {"prompt": prompt, "max_new_tokens": 1 + number % 9, "metadata": {"number": number}, **fields}
    return GenerationRequest(**fields)


def scoring(number: int) -> LoglikelihoodRequest:
    return LoglikelihoodRequest(" ".join(WORDS[:number]), f" {WORDS[number]}", metadata={"number": number})


# The engine


def test_engine_inherits_the_shared_config_and_stays_json(session: OrtInferenceSession) -> None:
    engine = OrtEngine(engine={"num_slots": 2}, provider_options={"a": "b"}, max_new_tokens=7)
    assert isinstance(engine, BaseEngine)
    assert isinstance(engine, SharedEngineConfig)
    assert isinstance(session, BaseInferenceSession)
    facts = json.loads(json.dumps(engine.to_dict()))
    assert facts["engine"] == {"num_slots": 2}
    assert (facts["max_new_tokens"], facts["device"], facts["execution_provider"]) == (7, None, None)


def test_settings_reach_the_model() -> None:
    engine = OrtEngine(execution_provider="cpu", engine={"chunk_size": 32}, batch_size=3)
    session = engine.build(onnx_model(model_kwargs={"max_length": 64, "allow_cpu_fallback": True}))
    assert engine.resolved_engine == "OrtEngine"
    assert (session.resolve_batch_size([]), session.max_input_length) == (3, 64)
    assert session.describe_execution()["fallback"] == "cpu"
    session.close()


@pytest.mark.parametrize(
    ("settings", "fields", "words"),
    [
        ({}, {"revision": "main"}, "'revision'"),
        ({}, {"trust_remote_code": True}, "'trust_remote_code'"),
        ({"trust_remote_code": True}, {}, "'trust_remote_code'"),
        ({}, {"tokenizer_kwargs": {"use_fast": False}}, "'tokenizer_kwargs'"),
        ({}, {"tokenizer": object()}, "'tokenizer_path'"),
        ({"device": "cpu", "execution_provider": "cpu"}, {}, "'device'.*'execution_provider'"),
        ({"engine": {"nope": 1}}, {}, "nope"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    settings: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        OrtEngine(**settings).build(onnx_model(**fields))


# Empty lists and wrong requests


def test_empty_lists_give_empty_lists(session: OrtInferenceSession) -> None:
    assert session.generate([]) == session.loglikelihood([]) == session.loglikelihood_rolling([]) == []
    assert list(session.generate_continuous([])) == list(session.loglikelihood_continuous([])) == []
    assert session.prepare_requests([]) == []


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (GenerationRequest(), "'messages'"),
        (GenerationRequest(prompt="a", num_beams=100), "'num_beams' = 100"),
        (GenerationRequest(prompt="a", num_beams=4, do_sample=True, temperature=0.5), "beams"),
        (GenerationRequest(prompt="a", do_sample=True), "'temperature' = 0"),
        (GenerationRequest(prompt="a", max_new_tokens=CONTEXT), "max_new_tokens"),
    ],
)
def test_generation_that_cannot_be_done_is_a_value_error(
    session: OrtInferenceSession, request_: GenerationRequest, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        session.generate([request_])
    with pytest.raises(ValueError, match=words):
        list(session.generate_continuous([(0, generation(0)), (1, request_)]))
    assert len(session.generate([generation(0)])) == 1


def test_empty_continuation_is_a_value_error(session: OrtInferenceSession) -> None:
    for request in (LoglikelihoodRequest("a", ""), LoglikelihoodRequest("a", continuation_input_ids=[])):
        with pytest.raises(ValueError, match="empty"):
            session.loglikelihood([request])
        with pytest.raises(ValueError, match="empty"):
            list(session.loglikelihood_continuous([(0, request)]))


# Order, keys, metadata


def test_generation_keeps_the_order_and_copies_metadata(session: OrtInferenceSession) -> None:
    requests = [generation(number) for number in range(40)]
    outputs = session.generate(requests)
    assert [output.metadata for output in outputs] == [{"number": number} for number in range(40)]
    assert all(output.metadata is not request.metadata for output, request in zip(outputs, requests, strict=True))
    assert [output.prompt for output in outputs] == [request.prompt for request in requests]


# Streams are lazy, and can be closed


def test_nothing_is_read_before_the_first_result_is_asked_for(session: OrtInferenceSession) -> None:
    read: list[int] = []
    stream = session.generate_continuous((read.append(number), generation(number)) for number in range(3))
    assert read == []
    assert len(list(stream)) == 3


def test_next_request_may_depend_on_the_result_before(session: OrtInferenceSession) -> None:
    """Requests are read while others run: the source waits for each answer before it gives the next request."""
    answered = threading.Semaphore(1)
    said: list[str] = []

    def source() -> Iterator[tuple[int, GenerationRequest]]:
        for number in range(4):
            assert answered.acquire(timeout=120)
            yield number, generation(number, prompt=f"Ann sees {''.join(said)}")

    for _, output in session.generate_continuous(source()):
        said.append(output.text)
        answered.release()
    assert len(said) == 4


@pytest.mark.parametrize("kind", ["generation", "scoring"])
def test_stream_closed_early_stops_reading_and_leaves_the_session_usable(
    session: OrtInferenceSession, kind: str
) -> None:
    read: list[int] = []

    def source() -> Iterator[tuple[int, Any]]:
        for number in range(100_000):
            read.append(number)
            yield number, generation(number % 50) if kind == "generation" else scoring(1 + number % 50)

    start = session.generate_continuous if kind == "generation" else session.loglikelihood_continuous
    stream = start(source())
    next(stream)
    stream.close()
    assert len(read) < 10_000
    assert len(session.generate([generation(0)])) == 1


def test_error_of_the_source_is_raised_as_it_is(session: OrtInferenceSession) -> None:
    def source() -> Iterator[tuple[int, GenerationRequest]]:
        yield 0, generation(0)
        raise KeyError("the data set is broken")

    with pytest.raises(KeyError, match="broken"):
        list(session.generate_continuous(source()))
    assert len(session.generate([generation(0)])) == 1


def test_session_may_be_used_while_a_stream_is_paused(session: OrtInferenceSession) -> None:
    stream = session.generate_continuous((number, generation(number)) for number in range(10))
    next(stream)
    assert len(session.loglikelihood([scoring(3)])) == 1
    assert len(list(stream)) == 9


# Sampling, prompts


def test_repeats_of_a_sampled_prompt_differ_and_a_seed_repeats_them() -> None:
    request = generation(0, do_sample=True, temperature=1.5, max_new_tokens=12)
    runs = []
    for _ in range(2):
        session = open_ours(seed=5)
        runs.append([output.text for output in session.generate([request] * 6)])
        session.close()
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 3


def test_number_of_new_tokens_is_the_engines_where_a_request_names_none() -> None:
    session = open_ours(max_new_tokens=3)
    whole = session.generate([generation(0, max_new_tokens=40)])[0].text
    few = session.generate([generation(0, max_new_tokens=None)])[0].text
    assert len(few) < len(whole)
    assert whole.startswith(few)
    session.close()


def test_chat_is_rendered_by_the_template_with_its_variables(session: OrtInferenceSession) -> None:
    messages = [{"role": "user", "content": "a stone"}]
    chats = [
        GenerationRequest(messages=messages, max_new_tokens=2),
        GenerationRequest(messages=messages, max_new_tokens=2, add_generation_prompt=False),
        GenerationRequest(messages=messages, max_new_tokens=2, chat_template_kwargs={"bos_token": "!"}),
    ]
    prompts = [output.prompt for output in session.generate(chats)]
    assert prompts == ["<bos>[user] a stone\n[assistant] ", "<bos>[user] a stone\n", "![user] a stone\n[assistant] "]


def test_prepared_requests_are_taken_as_they_are(session: OrtInferenceSession) -> None:
    requests = [generation(number) for number in range(10)]
    prepared = session.prepare_requests(requests)
    assert all(request.input_ids and request.rendered_prompt == request.prompt for request in prepared)
    assert session.prepare_requests(prepared) == prepared
    assert session.generate(prepared) == session.generate(requests)
    assert session.generate([replace(prepared[1], prompt="not read")]) == session.generate(prepared[1:2])


# What suites read


def test_what_suites_do_to_the_tokenizer_does_not_reach_the_model(session: OrtInferenceSession) -> None:
    before = session.generate([generation(3, stop=["e"])])
    session.tokenizer.padding_side = "left"
    session.tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert session.generate([generation(3, stop=["e"])]) == before


# Resources


def test_execution_is_json_stable_and_without_counters() -> None:
    session = open_ours()
    before = session.describe_execution()
    assert json.loads(json.dumps(before)) == before
    session.generate([generation(number) for number in range(8)])
    session.loglikelihood([scoring(number) for number in range(1, 40)])
    session.gc()
    assert session.describe_execution() == before
    session.close()
    assert session.describe_execution() == before
    assert before == {
        "generation_backend": "olive_ext",
        "attention_backend": "onnxruntime, as the model's graph has it",
        "device": "CPUExecutionProvider",
        "fallback": "none",
        "tensor_parallel_size": 1,
        "runtime": "onnxruntime",
        "providers": ["CPUExecutionProvider"],
        "batching": "range",
        "kv_cache": "in_place",
        "scoring_head": "hidden",
    }


def test_close_twice_and_use_behind_it() -> None:
    session = open_ours()
    stream = session.generate_continuous((number, generation(number)) for number in range(1000))
    next(stream)
    session.close()
    session.close()
    with pytest.raises(ConfigError.__base__):
        session.generate([generation(0)])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(family: str) -> Iterator[OrtInferenceSession]:
    session = open_ours(family)
    yield session
    session.close()


def check_scores(found: list[Any], expected: list[Any]) -> None:
    """Counts, greedy flags and metadata are equal, scores within 1e-4 nats. (Where they are beyond 100 nats, within
    1e-6 of them: the other engine adds up in fp32.)"""
    for attribute in ("token_count", "metadata", "is_greedy"):
        of_both = [[getattr(output, attribute, None) for output in outputs] for outputs in (found, expected)]
        assert of_both[0] == of_both[1], attribute
    scores = [output.logprob for output in expected]
    assert [output.logprob for output in found] == pytest.approx(scores, abs=1e-4, rel=1e-6)


@pytest.mark.parametrize(("kind", "number"), [("loglikelihood", 60), ("loglikelihood_rolling", 40), ("generate", 60)])
def test_answers_are_equal(kind: str, number: int, family: str, ours: OrtInferenceSession) -> None:
    """Scores within 1e-4. In lists, and in streams where there are such, under keys of any kind."""
    draw = Draw(number)
    drawn = {"loglikelihood": draw.scoring, "loglikelihood_rolling": draw.rolling, "generate": draw.generation}[kind]
    requests = [drawn(number) for number in range(number)]
    check = check_texts if kind == "generate" else check_scores
    expected = getattr(theirs(family), kind)(requests)
    check(getattr(ours, kind)(requests), expected)
    if kind != "loglikelihood_rolling":
        keyed = {(place, "key"): request for place, request in enumerate(requests)}
        streamed = [dict(getattr(one, f"{kind}_continuous")(keyed.items())) for one in (ours, theirs(family))]
        check(*([found[key] for key in keyed] for found in streamed))
        assert streamed[0].keys() == streamed[1].keys()


def check_texts(found: list[Any], expected: list[Any]) -> None:
    assert found == expected


def test_texts_of_beam_searches_equal(family: str, ours: OrtInferenceSession) -> None:
    draw = Draw(7)
    requests = [replace(draw.generation(3 * number + 2), num_beams=2 + number % 3, stop=[]) for number in range(9)]
    assert ours.generate(requests) == theirs(family).generate(requests)


def test_prepared_requests_equal(family: str, ours: OrtInferenceSession) -> None:
    draw = Draw(6)
    requests = [draw.generation(number) for number in range(20)]
    assert ours.prepare_requests(requests) == theirs(family).prepare_requests(requests)


def test_bos_in_the_text_is_not_doubled_and_a_text_alone_scores_its_bos(ours: OrtInferenceSession, family: str) -> None:
    requests = [LoglikelihoodRequest(context, " stone") for context in ("<bos>Ann sees", "Ann sees")]
    found = ours.loglikelihood(requests)
    assert found[0] == found[1]
    check_scores(found, theirs(family).loglikelihood(requests))
    rolling = [RollingLoglikelihoodRequest(text) for text in ("", "<bos>Ann sees", "Ann sees")]
    counts = [output.token_count for output in ours.loglikelihood_rolling(rolling)]
    assert counts[0] == 1
    assert counts[1] == counts[2]


def test_continuation_is_encoded_apart_from_its_context(ours: OrtInferenceSession, family: str) -> None:
    """Joined the text has fewer tokens than its two halves: lm-eval would score those."""
    requests = [LoglikelihoodRequest("Ann measures the qui", "et stone")]
    apart = len(ours.tokenizer("et stone", add_special_tokens=False)["input_ids"])
    (found,) = ours.loglikelihood(requests)
    assert found.token_count == apart
    check_scores([found], theirs(family).loglikelihood(requests))


def test_continuation_longer_than_the_context_length_is_scored_in_chunks(
    ours: OrtInferenceSession, family: str
) -> None:
    requests = [LoglikelihoodRequest(context, " " + TEXT[:9000]) for context in ("", TEXT[:2000])]
    found = ours.loglikelihood(requests)
    assert all(output.token_count > 2 * CONTEXT for output in found)
    check_scores(found, theirs(family).loglikelihood(requests))


def test_text_is_stripped_and_keeps_the_token_that_ended_it(ours: OrtInferenceSession, family: str) -> None:
    """Each prompt of one token is tried until the model ends a text by itself."""
    requests = [GenerationRequest(prompt=" ", input_ids=[token], max_new_tokens=40) for token in range(4, 124)]
    found = ours.generate(requests)
    ended = [place for place, output in enumerate(found) if output.text.endswith("<eos>")]
    if not ended:
        pytest.skip(f"this {family} of random weights never ends a text")
    expected = theirs(family).generate([requests[place] for place in ended])
    assert [found[place] for place in ended] == expected
    assert all(output.text == output.text.strip() for output in found)
