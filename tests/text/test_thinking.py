"""Where reasoning ends, in texts and in tokens; the budget as the engine and the journal are told of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.models.utils import postprocess_generated_text

from olive_ext.engine.requests import Request
from olive_ext.errors import ConfigError
from olive_ext.session.answer_journal import answer_key
from olive_ext.text.conversion import convert_generation
from olive_ext.text.requests import GenerationRequest
from olive_ext.text.thinking import ThinkingEnd
from olive_ext.text.tokenizer import Tokenizer
from tests.text.tiny import IM_END, IM_START, byte_fallback, byte_level

PIECES = st.lists(st.sampled_from(["</think>", "</th", "ink>", "the cat", "\n\n", " 東京", " ", "stop"]), max_size=8)


@given(pieces=PIECES, tokenizer=st.sampled_from([byte_level(), byte_fallback()]))
def test_answer_is_what_lm_eval_takes_for_it(pieces: list[str], tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("".join(pieces), add_special_tokens=False)
    request = GenerationRequest("the", stop=["\n\n", "stop"], think_end_token="</think>")
    answer, reasoning = ThinkingEnd.of("</think>", tokenizer).read(tokens, request)
    text = tokenizer.decode(tokens)
    assert answer == postprocess_generated_text(text, ["\n\n", "stop"], "</think>")
    assert reasoning.has_ended == ("</think>" in text)
    up_to_end = tokenizer.decode(tokens[: reasoning.num_tokens])
    if reasoning.has_ended:
        assert up_to_end.startswith(reasoning.text + "</think>")
        assert "</think>" not in tokenizer.decode(tokens[: reasoning.num_tokens - 1])[len(reasoning.text) :]
    else:
        assert (up_to_end, reasoning.text, reasoning.num_tokens) == (text, "", len(tokens))


def test_end_with_special_tokens_among_others_is_found() -> None:
    """As the end of gpt-oss's reasoning, "<|channel|>final<|message|>": decoding leaves a part of it out."""
    tokenizer = byte_level()
    the = tokenizer.encode("the", add_special_tokens=False)
    tokens = [*the, IM_START, *the, IM_END, *the, IM_START, *the, IM_END, *the, *the]
    end = ThinkingEnd.of("<|im_start|>the<|im_end|>", tokenizer)
    answer, reasoning = end.read(tokens, GenerationRequest("the"))
    assert (answer, reasoning.num_tokens) == ("thethe", len(tokens) - 2 * len(the))


def _converted(**settings: object) -> Request:
    request = GenerationRequest([9], 20, think_end_token="</think>", **settings)
    return convert_generation(byte_level(), request, frozenset(), 64).requests[0]


def test_answers_under_other_budgets_are_other_answers_in_the_journal() -> None:
    found = {answer_key(_converted(thinking_budget=budget)) for budget in (None, 3, 4)}
    assert len(found) == 3
    assert answer_key(_converted(thinking_budget=3)) in found


@pytest.mark.parametrize("budget", [-1, 2.5, True, "8"])
def test_budget_that_is_no_number_of_tokens_is_refused(budget: object) -> None:
    with pytest.raises(ConfigError, match=r"'thinking_budget' = .*a whole number of at least 0"):
        _converted(thinking_budget=budget)
