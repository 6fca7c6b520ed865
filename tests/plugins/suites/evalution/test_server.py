"""Evalution's OpenAI-compatible server over our engine gives what the engine itself gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evalution import Model
from evalution.engines import OpenAICompatible, build_openai_compatible_server
from evalution.engines.base import BaseInferenceSession, GenerationRequest, LoglikelihoodRequest

from olive_ext.plugins.suites.evalution import OrtEngine
from tests.plugins.suites.evalution.models import onnx_model, open_ours
from tests.plugins.suites.evalution.requests import Draw

pytestmark = [pytest.mark.slow, pytest.mark.other_env]


@pytest.fixture(scope="module")
def client() -> Iterator[BaseInferenceSession]:
    with build_openai_compatible_server(engine=OrtEngine(), model=onnx_model(), model_name="tiny") as server:
        yield OpenAICompatible(base_url=server.base_url, model_name="tiny", batch_size=8).build(Model(path="tiny"))


def test_scores_and_texts_are_those_without_a_server(client: BaseInferenceSession) -> None:
    draw = Draw(11)
    generation = [draw.generation(number) for number in range(40) if number % 4 != 1]  # it takes no ids
    scoring = [draw.scoring(number) for number in range(30)]
    rolling = [draw.rolling(number) for number in range(12)]
    direct = open_ours()
    assert [output.text for output in client.generate(generation)] == [
        output.text for output in direct.generate(generation)
    ]
    for found, expected in (
        (client.loglikelihood(scoring), direct.loglikelihood(scoring)),
        (client.loglikelihood_rolling(rolling), direct.loglikelihood_rolling(rolling)),
    ):
        assert [output.token_count for output in found] == [output.token_count for output in expected]
        assert [output.logprob for output in found] == pytest.approx([o.logprob for o in expected], abs=1e-4)
    direct.close()


def test_stream_through_the_server_answers_every_key(client: BaseInferenceSession) -> None:
    requests = {number: GenerationRequest(prompt=f"Ann sees {number}", max_new_tokens=4) for number in range(30)}
    assert dict(client.generate_continuous(requests.items())).keys() == requests.keys()


def test_users_error_is_the_clients(client: BaseInferenceSession) -> None:
    with pytest.raises(Exception, match=r"400|empty"):
        client.loglikelihood([LoglikelihoodRequest("a", "")])
