"""Many samples of one prompt: the prompt is computed once, and each sample is what a run of its own gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
from lm_eval.api.instance import Instance

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.session.requests import GenerationRequest
from tests.exports import VOCAB, genai_export

pytestmark = pytest.mark.slow

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
