"""Beam searches give transformers' sequences: a cache written in place, a hybrid whose states are forked, and an
encoder-decoder. Several prompts of different lengths run together here, and one after the other there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.session import Session
from olive_ext.session.requests import GeneratedSequence, GenerationRequest
from tests.exports import VOCAB, genai_export, hf_model
from tests.exports.optimum import optimum_export

STOPS = (1, *range(30, 42))
"""The tiny models hardly ever say 1."""

SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 0.0},
    {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0, "num_return_sequences": 3},
    {"num_beams": 3, "length_penalty": -0.5, "num_return_sequences": 3},
]
FAMILIES = {"llama": lambda: genai_export("llama"), "lfm2": lambda: genai_export("lfm2", "0.18.0")}


@pytest.fixture(
    scope="module",
    params=[
        *[pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
        pytest.param("marian", marks=pytest.mark.exporters),
        pytest.param("qwen3_5", marks=pytest.mark.exporters),
    ],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _folder(family: str) -> Path:
    if family == "marian":
        return optimum_export(family)
    return FAMILIES[family]() if family in FAMILIES else genai_export(family, "0.18.0")


@pytest.fixture(scope="module")
def session(family: str) -> Iterator[Session]:
    with olive_ext.open(_folder(family), engine={"num_slots": 10}) as session:
        session.stop_ids = frozenset(STOPS)
        yield session


@cache
def _model(family: str) -> Any:
    load = transformers.AutoModelForSeq2SeqLM if family == "marian" else transformers.AutoModelForCausalLM
    return load.from_pretrained(hf_model(family), dtype=torch.float32).eval()


def _prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in (5, 17, 3, 30)]


def _expected(family: str, prompt: Sequence[int], search: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[float]]:
    """Sequences up to a stop id, and their scores."""
    model = _model(family)
    start = model.config.decoder_start_token_id if family == "marian" else None
    settings = transformers.GenerationConfig(
        **search,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=list(STOPS),
        pad_token_id=0,
        decoder_start_token_id=start,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        mask = torch.ones((1, len(prompt)), dtype=torch.long)
        found = model.generate(torch.tensor([prompt]), attention_mask=mask, generation_config=settings)
    answers = [row[1 if family == "marian" else len(prompt) :] for row in found.sequences.tolist()]
    ends = [next((place for place, token in enumerate(one) if token in STOPS), len(one)) for one in answers]
    return [tuple(one[:end]) for one, end in zip(answers, ends, strict=True)], found.sequences_scores.tolist()


def test_sequences_and_scores_are_those_of_transformers(family: str, session: Session) -> None:
    asked = [(prompt, search) for search in SEARCHES for prompt in _prompts()]
    start = _model(family).config.decoder_start_token_id if family == "marian" else None

    def request(prompt: list[int], search: dict[str, Any]) -> GenerationRequest:
        given: dict[str, Any] = {"prompt": prompt} if start is None else {"prompt": [start], "source": prompt}
        return GenerationRequest(**given, max_new_tokens=12, **search)

    outputs = session.generate([request(*pair) for pair in asked])
    for pair, output in zip(asked, outputs, strict=True):
        tokens, scores = _expected(family, *pair)
        assert [one.tokens for one in output.sequences] == tokens, pair
        assert [one.score for one in output.sequences] == pytest.approx(scores, rel=1e-5)  # of fp32 recurrences
        assert output.tokens == tokens[0]
    assert any(len(output.tokens) < 12 for output in outputs) or family == "marian"


@pytest.mark.slow
def test_stop_string_ends_a_sequence_as_in_transformers() -> None:
    """The first text behind which there is one: of each of its sequences the stop string is searched by itself."""
    model = _model("llama")
    with olive_ext.open(FAMILIES["llama"](), engine={"num_slots": 4}) as session:
        for prompt in _prompts():
            (output,) = session.generate([GenerationRequest(prompt, max_new_tokens=12, num_beams=4, stop=" t")])
            found = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                generation_config=transformers.GenerationConfig(
                    num_beams=4, max_new_tokens=12, eos_token_id=1, pad_token_id=0, stop_strings=[" t"]
                ),
                tokenizer=session.tokenizer.hf,
            )
            tokens = found[0, len(prompt) :].tolist()
            while tokens and tokens[-1] in (0, 1):
                tokens.pop()
            assert output.tokens == tuple(tokens)


@pytest.mark.slow
def test_lm_eval_gets_the_answers_of_its_own_backend() -> None:
    search = {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True, "until": ["zzzz"], "max_gen_toks": 8}
    texts = ["Ann sees the blue", "Bob carries a heavy wheel", "the old"]
    asked = [Instance("generate_until", {}, (text, search), place, ("t", place, 1)) for place, text in enumerate(texts)]
    reference = HFLM(pretrained=str(hf_model("llama")), device="cpu", dtype="float32", batch_size=1)
    with OrtLM(str(FAMILIES["llama"]())) as lm:
        found = lm.generate_until(asked, disable_tqdm=True)
    assert found == reference.generate_until(asked, disable_tqdm=True)
    assert all(found)


def test_first_sequence_is_the_output(session: Session, family: str) -> None:
    given: dict[str, Any] = {"source": [5, 6, 7], "prompt": [0]} if family == "marian" else {"prompt": [5, 6, 7]}
    (output,) = session.generate([GenerationRequest(**given, max_new_tokens=6, num_beams=2, num_return_sequences=2)])
    first, second = output.sequences
    assert first == GeneratedSequence(output.text, output.tokens, first.score, output.finish_reason, output.stop_id)
    assert first.score >= second.score
