"""Pieces of a growing answer: each is certain when it is given, and together they are what `generate` gives. Nothing is
left running where the reader of a stream stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import olive_ext
from olive_ext.errors import ConfigError, SessionError
from olive_ext.session import Session
from olive_ext.session.generation_bounds import StopChecker, TextStream
from olive_ext.session.requests import GenerationRequest
from olive_ext.session.tokenizer import Tokenizer
from tests.exports import TEXT, genai_export
from tests.refusals import refused
from tests.session.tiny import IM_END, byte_fallback, byte_level


def _word_pieces() -> Tokenizer:
    vocab = {"[UNK]": 0, "do": 1, "n": 2, "'": 3, "##t": 4, ".": 5, "the": 6, "##s": 7}
    core = Core(models.WordPiece(vocab, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True), "pieces")


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback(), "word_pieces": _word_pieces()}
STOPS = st.lists(
    st.sampled_from(
        ["\n\n", "stop", "the<|im_end|>", "<|im_end|>t", " ", "é", "st", ".", "\ufffd", "e\ufffd", "a\ufffd", "\ufffdé"]
    ),
    max_size=3,
)


def _streamed(tokenizer: Tokenizer, tokens: list[int], stops: list[str]) -> tuple[list[str], str]:
    """The pieces up to the token at which a stop is found, and the text there."""
    checker, stream, pieces = StopChecker(tokenizer, stops), TextStream(tokenizer, stops), []
    for count in range(1, len(tokens) + 1):
        is_over = checker(tokens[:count])
        pieces.append(stream.piece(tokens[:count]))
        text = checker.text(tokens[:count])
        if is_over:
            break
    return pieces, text if tokens else ""


BYTES = [*"é東🙂a ".encode(), 0xEF, 0xBF, 0xBD, 0x9F]
"""Characters over several tokens, U+FFFD itself, and a byte that begins none."""


def _bytes(tokenizer: Tokenizer, values: list[int]) -> list[int]:
    """The tokens that are these bytes alone."""
    names = bytes_to_unicode() if tokenizer.where == "byte_level" else {byte: f"<0x{byte:02X}>" for byte in range(256)}
    return [tokenizer.hf.convert_tokens_to_ids(names[byte]) or 0 for byte in values]


def _random_tokens(tokenizer: Tokenizer, random: Random) -> list[int]:
    """Half of them are single bytes, others special tokens, words, or any."""
    single, size = _bytes(tokenizer, BYTES), len(tokenizer.hf.get_vocab())
    words = tokenizer.encode("the stop a é🙂", add_special_tokens=False)
    pools = [single, single, words, range(size), range(min(5, size))]
    return [random.choice(random.choice(pools)) for _ in range(random.randrange(30))]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_any_tokens_and_what_is_left_are_the_answer(name: str) -> None:
    """As `Session.stream` joins them: pieces, and of the whole text what these lack."""
    tokenizer, random = TOKENIZERS[name], Random(5)
    characters = ["é", "東", "🙂", " ", "<|im_end|>\ufffd"]
    pick = [*characters, "\ufffd", "\ufffd\ufffd", "a\ufffd", "\ufffda", "é\ufffd", "\ufffdé"]
    for _ in range(300):
        tokens, stops = _random_tokens(tokenizer, random), random.sample(pick, random.randrange(3))
        pieces, text = _streamed(tokenizer, tokens, stops)
        assert text.startswith("".join(pieces)), (tokens, stops)


@given(
    text=st.text(alphabet="the stopé東🙂\n.x", max_size=40),
    stops=STOPS,
    name=st.sampled_from(["byte_level", "byte_fallback"]),
)
@example(text="🙂🙂the東stop", stops=["stop"], name="byte_fallback")
def test_pieces_of_texts_lack_no_more_than_may_be_a_stop_or_bytes(text: str, stops: list[str], name: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces, whole = _streamed(tokenizer, tokens, stops)
    given = "".join(pieces)
    assert whole.startswith(given)
    if not stops and text and text[-1] in "thesop\n.":
        assert given == whole


def test_text_comes_token_by_token() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("the cat sat", add_special_tokens=False)
    pieces, _ = _streamed(tokenizer, [*tokens, IM_END, *tokens], ["\n\n"])
    assert [piece for piece in pieces if piece] == [tokenizer.decode([token]) for token in [*tokens, *tokens]]


def test_text_that_spaces_are_cleaned_of_is_given_at_its_end_alone() -> None:
    assert _streamed(TOKENIZERS["word_pieces"], [1, 2, 3, 4, 5], [])[0] == [""] * 5


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
