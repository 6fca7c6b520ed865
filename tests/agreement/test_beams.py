"""Beam searches beside the table of agreement: stop strings, lm-eval's requests, and the first sequence."""

from __future__ import annotations

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.session.requests import GenerationRequest
from tests.agreement.asked import Drawn
from tests.agreement.references import causal
from tests.exports import genai_export, hf_model

pytestmark = pytest.mark.slow


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


def test_lm_eval_gets_the_answers_of_its_own_backend() -> None:
    search = {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True, "until": ["zzzz"], "max_gen_toks": 8}
    texts = ["Ann sees the blue", "Bob carries a heavy wheel", "the old"]
    asked = [Instance("generate_until", {}, (text, search), place, ("t", place, 1)) for place, text in enumerate(texts)]
    reference = HFLM(pretrained=str(hf_model("llama")), device="cpu", dtype="float32", batch_size=1)
    with OrtLM(str(genai_export("llama"))) as lm:
        found = lm.generate_until(asked, disable_tqdm=True)
    assert found == reference.generate_until(asked, disable_tqdm=True)
    assert all(found)
