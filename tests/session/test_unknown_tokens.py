"""Token ids that a caller gives, and that the model has no row for, are refused by request and token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import olive_ext
from olive_ext.errors import ConfigError, TaskError
from olive_ext.session.requests import GenerationRequest, RollingRequest
from tests.check.tiny import VOCABULARY, put_model
from tests.refusals import refused


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[olive_ext.Session]:
    folder = put_model(tmp_path_factory.mktemp("model"))
    with olive_ext.open(folder, max_length=64) as opened:
        yield opened


def test_last_token_is_taken(session: olive_ext.Session) -> None:
    (output,) = session.loglikelihood([([1, VOCABULARY - 1], [VOCABULARY - 1])])
    assert output.token_count == 1


@pytest.mark.parametrize("token", [VOCABULARY, 5000, 2**31 - 1])
def test_token_beyond_the_embedding_is_named(session: olive_ext.Session, token: int) -> None:
    with refused(TaskError, "contradiction", holds=("request 1", f"token {token}", str(VOCABULARY))):
        session.loglikelihood([([1], [2]), ([1, token], [2])])
    with refused(TaskError, "contradiction", holds=("request 0", f"token {token}", str(VOCABULARY))):
        session.loglikelihood([([1], [token])])
    with refused(TaskError, "contradiction", holds=("request 0", f"token {token}", str(VOCABULARY))):
        session.generate([GenerationRequest([1, token], max_new_tokens=2)])
    with refused(TaskError, "contradiction", holds=("request 0", f"token {token}", str(VOCABULARY))):
        session.loglikelihood_rolling([RollingRequest([5, 6], prefix=token)])
    with refused(TaskError, "contradiction", holds=("request 'a'", f"token {token}", str(VOCABULARY))):
        list(session.generate_continuous([("a", GenerationRequest([token], max_new_tokens=2))]))


def test_end_of_reasoning_beyond_the_embedding_is_named(session: olive_ext.Session) -> None:
    for settings in ({}, {"thinking_budget": 1}):
        with refused(ConfigError, "wrong_value", "think_end_token", VOCABULARY):
            session.generate([[1]], max_new_tokens=9, think_end_token=VOCABULARY, **settings)
