"""Answers under a thinking budget are those of transformers: its `generate` is stopped at the budget, given the end of
the reasoning, and goes on."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import ConfigError
from olive_ext.session.requests import GenerationRequest
from olive_ext.session.tokenizer import load_tokenizer
from tests.agreement.references import causal
from tests.exports import VOCAB, genai_export, hf_model
from tests.refusals import refused

NUM_NEW = 24


@cache
def _tokenizer() -> Any:
    return load_tokenizer(str(hf_model("llama")))


@cache
def _free(prompt: tuple[int, ...]) -> list[int]:
    return causal(hf_model("llama")).generate(prompt, NUM_NEW)


def _by_hand(prompt: tuple[int, ...], end: str | int, budget: int) -> tuple[list[int], bool]:
    """transformers' tokens, and whether the end was put there."""
    text = _tokenizer().decode
    thought = _free(prompt)[:budget]
    has_ended = end in thought if isinstance(end, int) else end in text(thought)
    if has_ended or len(_free(prompt)) < budget:
        return _free(prompt), False
    marker = [end] if isinstance(end, int) else _tokenizer().encode(end, add_special_tokens=False)
    begun = [*thought, *marker]
    return begun + causal(hf_model("llama")).generate([*prompt, *begun], NUM_NEW - len(begun)), True


def _asked(num_prompts: int) -> list[tuple[tuple[int, ...], str | int, int]]:
    """Ends that the model does not write, and such that it does: within the budget, and behind it."""
    rng = random.Random(7)
    asked: list[tuple[tuple[int, ...], str | int, int]] = []
    for number in range(num_prompts):
        prompt = tuple(rng.randrange(4, VOCAB) for _ in range(rng.randint(3, 40)))
        free = _free(prompt)
        written = _tokenizer().decode(free[4:6])
        own: list[str | int] = ["</think>", 5, free[6], written if "\ufffd" not in written else "."]
        asked += [(prompt, end, budget) for end, budget in zip(own, rng.sample(range(12), 4), strict=True)]
        asked.append((prompt, free[6], 3 if number % 2 else 9))
    return asked


OTHERS = [{}, {"engine": {"scoring": "rows", "num_slots": 3}}, {"isolation": "process"}]


@pytest.mark.parametrize(
    ("num_prompts", "settings"), [(2, {}), *(pytest.param(5, one, marks=pytest.mark.long) for one in OTHERS)], ids=str
)
def test_tokens_under_a_budget_are_those_of_transformers_with_the_end_put_there(
    num_prompts: int, settings: dict[str, Any]
) -> None:
    asked = _asked(num_prompts)
    requests = [
        GenerationRequest(prompt, NUM_NEW, think_end_token=end, thinking_budget=budget) for prompt, end, budget in asked
    ]
    with olive_ext.open(genai_export("llama", None), **settings) as session:
        outputs = session.generate(requests)
    expected = [_by_hand(*one) for one in asked]
    assert [list(output.tokens) for output in outputs] == [tokens for tokens, _ in expected]
    found = [output.reasoning.is_forced for output in outputs if output.reasoning is not None]
    assert found == [is_forced for _, is_forced in expected]
    assert num_prompts < sum(found) < len(found) - num_prompts // 2
    for output, (_, end, budget) in zip(outputs, asked, strict=True):
        reasoning = output.reasoning
        assert reasoning is not None
        if reasoning.is_forced:
            size = 1 if isinstance(end, int) else len(session.tokenizer.encode(end, add_special_tokens=False))
            assert reasoning.has_ended
            assert reasoning.num_tokens >= budget + size


def test_budgets_that_leave_no_room_are_refused() -> None:
    with olive_ext.open(genai_export("llama", None)) as session:
        for budget in (7, 8, 20):
            with refused(ConfigError, "contradiction", "thinking_budget", budget, holds="8 new tokens"):
                session.generate(["the"], max_new_tokens=8, think_end_token=5, thinking_budget=budget)
        with refused(ConfigError, "missing", holds=("thinking_budget", "think_end_token", "2")):
            session.generate(["the"], thinking_budget=2)
        with refused(ConfigError, "wrong_value", "think_end_token", ""):
            session.generate(["the"], think_end_token="")
        assert session.counters.tokens_fed == 0
