"""`Session.stream`: pieces that join to `generate`'s text, and nothing left running where the reader stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import ConfigError, SessionError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest
from tests.exports import TEXT, genai_export
from tests.refusals import refused

PROMPTS = ["the cat sat", TEXT[:60], "ñ東🙂", ""]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with olive_ext.open(genai_export("llama", None)) as session:
        yield session


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "olive_ext-stream"]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_pieces_join_to_the_text_of_generate(session: Session, temperature: float) -> None:
    for number, prompt in enumerate(PROMPTS):
        settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": number}
        whole = session.generate(prompt, **settings)
        pieces = list(session.stream(prompt, **settings))
        assert "".join(pieces) == whole.text
        assert all(pieces)
        assert len(pieces) > len(whole.tokens) / 3
        for stop in [whole.text[10:12], whole.text[20], "\ufffd"]:
            text = session.generate(prompt, stop=["never there", stop], **settings).text
            assert "".join(session.stream(GenerationRequest(prompt, stop=["never there", stop], **settings))) == text
    assert not threads()


def test_reader_that_breaks_ends_the_answer_which_is_kept_nowhere(session: Session, tmp_path: Path) -> None:
    session.keep_answers(tmp_path / "answers")
    before = session.counters.tokens_generated
    for _ in session.stream("the cat", max_new_tokens=400):
        break
    assert not threads()
    assert session.counters.tokens_generated - before < 400
    assert session.journal.path.read_text().count("\n") == 1  # its head
    whole = session.generate("the cat", max_new_tokens=30)
    assert "".join(session.stream("the cat", max_new_tokens=30)) == whole.text  # one piece, as it is known
    session.keep_answers(None)
    assert session.generate("the cat", max_new_tokens=30) == whole


def test_other_calls_wait_for_the_stream_and_those_inside_a_call_are_refused(session: Session) -> None:
    alone = session.generate("the dog", max_new_tokens=20)
    for piece in session.stream("the cat", max_new_tokens=20):
        assert piece
        assert session.generate("the dog", max_new_tokens=20) == alone
    results = session.generate_continuous([(1, "the"), (2, "cat")])
    next(results)
    with refused(SessionError, "closed", holds="generate_continuous"):
        next(session.stream("the"))
    list(results)
    assert not threads()


def test_errors_reach_the_reader_and_a_closed_session_streams_nothing() -> None:
    with olive_ext.open(genai_export("llama", None)) as session:
        stream = session.stream("the", max_new_tokens=5)
        session.executor.runner.run = None
        with pytest.raises(TypeError):
            list(stream)
        late = session.stream("the")
    with refused(SessionError, "closed"):
        next(late)
    with refused(SessionError, "closed"):
        session.stream("the")
    assert not threads()


@pytest.mark.long
def test_text_of_a_model_on_workers_is_one_piece() -> None:
    with olive_ext.open(genai_export("llama", None), isolation="process") as session:
        whole = session.generate("the cat", max_new_tokens=12)
        for _ in range(2):
            unread = session.stream("the cat", max_new_tokens=12, stop=["\n"])
            assert next(unread) in whole.text
            unread.close()
            assert not threads()
            assert list(session.stream("the cat", max_new_tokens=12)) == [whole.text]
        with pytest.raises(ConfigError, match="'think_end_token' = 'x'"):
            session.stream("the cat", think_end_token="x", thinking_budget=2)
