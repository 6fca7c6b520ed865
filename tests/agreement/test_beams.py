"""Beam searches beside the table of agreement: stop strings, lm-eval's requests, and the first sequence. Many samples
of one prompt: the prompt is computed once, and each sample is what a run of its own gives. Whisper's suppressed
tokens beside the table of agreement: samples, scores, bytes that reach the host, a checkpoint on transformers, and
Whisper's own `generate`, which adds languages and timestamps to that of the table."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest
from tests.agreement.asked import Drawn, noises
from tests.agreement.packages import package as package_of
from tests.agreement.packages import suppressed
from tests.agreement.references import STOPS, causal, load
from tests.agreement.test_table import AHEAD, FIVE
from tests.exports import VOCAB, genai_export, hf_model


def test_stop_string_ends_a_sequence_as_in_transformers() -> None:
    """The first text behind which there is one: of each of its sequences the stop string is searched by itself."""
    model = causal(hf_model("llama")).model
    with olive_ext.open(genai_export("llama"), engine={"num_slots": 4}) as session:
        for prompt in (Drawn(3).words(length) for length in (5, 17, 3, 30)):
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


NUM_PROMPT, NUM_SAMPLES, NUM_NEW = 100, 16, 8


def _samples() -> list[GenerationRequest]:
    rng = random.Random(3)
    prompt = [rng.randrange(4, VOCAB) for _ in range(NUM_PROMPT)]
    return [GenerationRequest(prompt, NUM_NEW, temperature=0.9, seed=seed) for seed in range(NUM_SAMPLES)]


@pytest.mark.parametrize("engine", [{}, {"scoring": "rows", "num_slots": 2}, {"num_slots": 3}])
def test_prompt_of_many_samples_is_fed_once_and_each_is_that_of_a_run_alone(engine: dict[str, Any]) -> None:
    samples, path = _samples(), genai_export("llama", None)
    with olive_ext.open(path, engine=engine) as session:
        together = session.generate(samples)
        fed = session.counters.tokens_fed
    with olive_ext.open(path, engine=engine) as session:
        alone = [session.generate([sample])[0] for sample in samples]
    assert [output.tokens for output in together] == [output.tokens for output in alone]
    assert len({tuple(output.tokens) for output in together}) > NUM_SAMPLES // 2
    # a sample feeds the prompt's last token itself, whose distribution is its own to draw from, and all but its last
    assert fed == (NUM_PROMPT - 1) + NUM_SAMPLES * NUM_NEW


def test_samples_of_lm_evals_repeats_have_seeds_by_request_and_number() -> None:
    """However the requests are mixed, and whichever prompts are beside them."""
    gen_kwargs = {"do_sample": True, "temperature": 0.9, "max_gen_toks": 6, "until": []}
    texts = ["one two three", "four five"]
    asked = [
        Instance(request_type="generate_until", doc={}, arguments=(text, gen_kwargs), idx=0, metadata=("t", at, 4))
        for at, text in enumerate(texts)
    ]
    with olive_ext.open(genai_export("llama", None)) as session:
        lm = OrtLM(session=session)
        blocks = lm.generate_until([asked[0]] * 4 + [asked[1]] * 4)
        mixed = lm.generate_until([asked[at] for _ in range(4) for at in (1, 0)])
        alone = [lm.generate_until([one] * 4) for one in asked]
    assert blocks == [*mixed[1::2], *mixed[0::2]] == [*alone[0], *alone[1]]
    assert len(set(blocks)) > 4


NUM_TOKENS = 12


@pytest.fixture(scope="module")
def package() -> Path:
    return package_of("whisper suppressing").path


@pytest.fixture(scope="module", params=[FIVE, *AHEAD], ids=str)
def session(package: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with olive_ext.open(package, engine=request.param) as session:
        session.stop_ids = frozenset(STOPS)
        yield session


def _request(source: Any, **search: Any) -> GenerationRequest:
    return GenerationRequest(source=source, max_new_tokens=NUM_TOKENS, **search)


def test_samples_hold_no_suppressed_token_and_are_others_than_with_them(session: Session) -> None:
    asked = [
        GenerationRequest(source=noises()[0], max_new_tokens=NUM_TOKENS, temperature=1.0, top_k=5, seed=seed)
        for seed in range(40)
    ]
    said = [output.tokens for output in session.generate(asked)]
    lists = suppressed()
    assert not {token for tokens in said for token in tokens} & set(lists["suppress_tokens"])
    assert not {tokens[0] for tokens in said if tokens} & set(lists["begin_suppress_tokens"])
    assert {token for tokens in said for token in tokens[1:]} & set(lists["begin_suppress_tokens"])


def test_nothing_of_a_row_but_its_best_token_comes_to_the_host(package: Path, session: Session) -> None:
    """Bytes of greedy answers are those of a model that suppresses nothing."""
    before = session.describe_execution()["counters"]["host_bytes"]
    session.generate([_request(noises()[0])])
    taken = session.describe_execution()["counters"]["host_bytes"] - before
    assert 0 < taken <= 64 * NUM_TOKENS


def test_whispers_own_generate_gives_the_same_text_with_four_beams(package: Path) -> None:
    """With the stop id and the settings that its configuration names."""
    model = load(hf_model("whisper"))
    model.generation_config.update(**suppressed())
    given = torch.tensor(np.stack(noises()))
    with torch.inference_mode():
        found = model.generate(given, num_beams=4, max_new_tokens=NUM_TOKENS).tolist()
    with olive_ext.open(package) as opened:
        outputs = opened.generate([_request(one, num_beams=4) for one in noises()])
        ends = opened.stop_ids | {model.config.pad_token_id, model.config.decoder_start_token_id}
    for row, output in zip(found, outputs, strict=True):
        assert tuple(token for token in row if token not in ends) == output.tokens
