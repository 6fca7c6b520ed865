"""`OrtLM` against lm-eval's HFLM on the same weights: the numbers and texts are HFLM's."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.backends.reference import MAX_LENGTH, hflm, instances, ort_lm
from tests.session.tiny import CORPUS

WORDS = " ".join(CORPUS[:3]).split(" ")


def text(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


@pytest.mark.parametrize("has_bos", [True, False])
def test_loglikelihood_of_mixed_requests_is_hflms(has_bos: bool) -> None:
    rng = random.Random(1)
    pairs = [
        (text(rng, 1, 30) + rng.choice(["", " ", "\n\n"]), rng.choice(["", " "]) + text(rng, 1, 6)) for _ in range(150)
    ]
    pairs += [("", text(rng, 1, 5)) for _ in range(10)]
    pairs += [(shared := text(rng, 4, 9), f" {word}") for _ in range(5) for word in "abcd"]
    assert shared
    ours = ort_lm(has_bos).loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    theirs = hflm(has_bos).loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)


@pytest.mark.parametrize("has_bos", [True, False])
def test_rolling_with_the_hflm_option_is_hflms(has_bos: bool) -> None:
    rng = random.Random(2)
    texts = [("",), ("a",), *((text(rng, 1, 120),) for _ in range(20))]
    ours = ort_lm(has_bos, hflm_rolling_bos=True).loglikelihood_rolling(instances("r", texts), disable_tqdm=True)
    theirs = hflm(has_bos).loglikelihood_rolling(instances("r", texts), disable_tqdm=True)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


GEN_KWARGS: list[dict[str, Any]] = [
    {"until": ["\n\n"], "max_gen_toks": 12},
    {"until": " ", "max_new_tokens": 9},
    {"until": ["e", "the"], "max_tokens": 16, "do_sample": False, "temperature": 0.7},
    {"until": [], "max_gen_toks": 20, "temperature": 0.0},
    {"until": ["<|im_end|>"], "max_completion_tokens": 6, "num_beams": 1},
]


@pytest.mark.parametrize("has_bos", [True, False])
def test_greedy_generations_are_hflms(has_bos: bool) -> None:
    rng = random.Random(3)
    asked = [(text(rng, 1, 40), kwargs) for kwargs in GEN_KWARGS for _ in range(8)]
    ours = ort_lm(has_bos).generate_until(instances("generate_until", asked), disable_tqdm=True)
    theirs = hflm(has_bos, batch_size=1).generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert ours == theirs
    assert len(set(ours)) > 10


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_is_hflms(add_generation_prompt: bool) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "A:"},
    ]
    ours, theirs = ort_lm(), hflm()
    assert ours.apply_chat_template(chat, add_generation_prompt) == theirs.apply_chat_template(
        chat, add_generation_prompt
    )
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tok_encode(ours.apply_chat_template(chat)) == theirs.tok_encode(theirs.apply_chat_template(chat))


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_add_bos_token_is_hflms(add_bos_token: bool) -> None:
    pairs = [("the cat", " sat"), ("<bos>the cat", " sat"), ("", "the")]
    ours = ort_lm(add_bos_token=add_bos_token).loglikelihood(instances("l", pairs), disable_tqdm=True)
    theirs = hflm(add_bos_token=add_bos_token).loglikelihood(instances("l", pairs), disable_tqdm=True)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)


def test_prefix_token_id_replaces_bos_for_empty_contexts() -> None:
    ours = ort_lm(prefix_token_id=9).loglikelihood(instances("l", [("", "the cat")]), disable_tqdm=True)
    theirs = hflm(prefix_token_id=9).loglikelihood(instances("l", [("", "the cat")]), disable_tqdm=True)
    assert ours[0][0] == pytest.approx(theirs[0][0], abs=1e-4)


def test_token_requests_at_the_context_limit_are_hflms() -> None:
    rng = random.Random(4)
    ids = [rng.randrange(5, 300) for _ in range(200)]
    asked = [
        (None, ids[:length], ids[100 : 100 + targets])
        for length in (1, MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1, 90)
        for targets in (1, 2, MAX_LENGTH - 1, MAX_LENGTH)
    ]
    ours = ort_lm()._loglikelihood_tokens(asked, disable_tqdm=True)
    theirs = hflm()._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=2e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
