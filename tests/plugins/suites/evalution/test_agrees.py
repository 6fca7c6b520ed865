"""Scores and texts are those of Evalution's own transformers engine on the same fp32 weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from evalution.engines.base import GenerationRequest, LoglikelihoodRequest, RollingLoglikelihoodRequest

from olive_ext.plugins.suites.evalution import OrtInferenceSession
from tests.exports import CONTEXT, TEXT
from tests.plugins.suites.evalution.local import FAMILIES, Draw, open_ours, theirs

pytestmark = pytest.mark.other_env


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
