"""Where reasoning ends, in texts and in tokens; the budget as the engine and the journal are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.models.utils import postprocess_generated_text
from tokenizers import Tokenizer as Core
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from olive_ext.engine.requests import FinishReason, Request, Result
from olive_ext.errors import ConfigError
from olive_ext.session.answer_journal import request_digest
from olive_ext.session.conversion import ThinkingEnd, convert, output_of
from olive_ext.session.requests import GenerationOutput, GenerationRequest, Reasoning
from olive_ext.session.session import Session
from olive_ext.session.tokenizer import Tokenizer
from tests.refusals import refused
from tests.session.fake_engine import FakeEngine
from tests.session.tiny import IM_END, IM_START, byte_fallback, byte_level

PIECES = st.lists(st.sampled_from(["</think>", "</th", "ink>", "the cat", "\n\n", " 東京", " ", "stop"]), max_size=8)


@given(pieces=PIECES, tokenizer=st.sampled_from([byte_level(), byte_fallback()]))
def test_answer_is_what_lm_eval_takes_for_it(pieces: list[str], tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("".join(pieces), add_special_tokens=False)
    answer, reasoning = ThinkingEnd.of("</think>", tokenizer).read(tokens, ["\n\n", "stop"])
    text = tokenizer.decode(tokens)
    assert answer == postprocess_generated_text(text, ["\n\n", "stop"], "</think>")
    assert reasoning.has_ended == ("</think>" in text)
    up_to_end = tokenizer.decode(tokens[: reasoning.num_tokens])
    if reasoning.has_ended:
        assert up_to_end.startswith(reasoning.text + "</think>")
        assert "</think>" not in tokenizer.decode(tokens[: reasoning.num_tokens - 1])[len(reasoning.text) :]
    else:
        assert (up_to_end, reasoning.text, reasoning.num_tokens) == (text, "", len(tokens))


def _session(tokenizer: Tokenizer | None = None) -> Session:
    return Session(FakeEngine(64), tokenizer or byte_level(), stop_ids=[IM_END])


def _converted(request: GenerationRequest, session: Session) -> Request:
    ((converted,), _) = convert(session, request)
    return converted


def _asked(prompt: Any = (9,), end: str | int = "</think>", **settings: Any) -> GenerationRequest:
    return GenerationRequest(prompt, 20, think_end_token=end, **settings)


def _answer(tokens: Sequence[int], request: GenerationRequest, session: Session) -> GenerationOutput:
    result = Result(tokens=tuple(tokens), finish_reason=FinishReason.LENGTH)
    return output_of(session, request, [_converted(request, session)], [result])


def test_answers_under_other_budgets_are_other_answers_in_the_journal() -> None:
    found = {request_digest(_converted(_asked(thinking_budget=budget), _session())) for budget in (None, 3, 4)}
    assert len(found) == 3
    assert request_digest(_converted(_asked(thinking_budget=3), _session())) in found


@pytest.mark.parametrize(("prompt", "is_over"), [("the</think>\n\n", True), ("</think>", True), ("</think>the", False)])
@pytest.mark.parametrize("end", ["</think>", IM_START])
def test_prompt_that_ends_with_the_end_of_reasoning_leaves_none_to_bound(
    prompt: str, is_over: bool, end: str | int
) -> None:
    """As templates write it for answers without reasoning; else the end would be put into the answer."""
    prompt = prompt if isinstance(end, str) else prompt.replace("</think>", "<|im_start|>")
    asked = _asked(prompt, end, thinking_budget=3)
    generation = _converted(asked, _session()).generation
    assert (generation.thinking is None) is is_over
    answer = byte_level().encode("the cat the", add_special_tokens=False)
    reasoning = _answer(answer, asked, _session()).reasoning
    assert reasoning.is_forced is (not is_over)
    unbound = _answer(answer, _asked(prompt, end), _session())
    assert unbound.text == "the cat the"
    assert (unbound.reasoning.num_tokens, unbound.reasoning.has_ended) == (
        (0, True) if is_over else (len(answer), False)
    )


@pytest.mark.parametrize(
    ("end", "value"), [(IM_END, IM_END), *((end, end) for end in ("<|im_end|>", "the end<|im_end|>")), ("\ud800", None)]
)
def test_end_that_is_never_found_is_refused(end: str | int, value: object) -> None:
    for settings in ({}, {"thinking_budget": 3}):
        with refused(ConfigError, "wrong_value", "think_end_token", value):
            _converted(_asked(end=end, **settings), _session())


def test_end_without_tokens_of_its_own_cannot_be_put_there() -> None:
    core = Core(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]"), "words")
    with refused(ConfigError, "wrong_value", "think_end_token", "done", holds="[UNK]"):
        convert(_session(tokenizer), _asked([1], "done", thinking_budget=3))


def test_forced_end_of_bytes_is_found_beside_a_character_that_was_cut() -> None:
    """SentencePiece's decoder takes bytes in a row for characters all together or not at all."""
    tokenizer, end = byte_fallback(), "◁t▷"
    known = tokenizer.hf.get_vocab()
    half, the = known["<0xE6>"], tokenizer.encode("the", add_special_tokens=False)
    request, session = GenerationRequest([5], 40, think_end_token=end, thinking_budget=2), _session(tokenizer)
    generation = _converted(request, session).generation
    tokens = (*the[:1], half, *generation.thinking.marker, half, *the)
    output = _answer(tokens, request, session)
    assert end not in tokenizer.decode(tokens)
    assert (output.text, output.reasoning) == (
        tokenizer.decode([half, *the]),
        Reasoning("the�", len(tokens) - 2, True, True),
    )
