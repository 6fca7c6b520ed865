"""Hugging Face models behind the engine beside the table of agreement: tree batches, steps of a runner, refusals."""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Beams, Generation, Request, Result
from olive_ext.engine.runners.hf_runner import HfRunner, context_length, load_model
from olive_ext.engine.step import LogitsRow, Row, Step
from olive_ext.errors import ModelError, OliveExtError, RunError
from olive_ext.media.items import Source
from tests.refusals import refused

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


@functools.cache
def make(family: str) -> Any:
    import transformers

    torch.manual_seed(3)
    config: Any
    if family == "llama":
        config = transformers.LlamaConfig(**SHAPE)
    else:
        config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def naive(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1).numpy()
    return logits


def requests(count: int) -> list[Request]:
    rng = random.Random(2)
    stem = [rng.randrange(VOCAB) for _ in range(20)]
    found = []
    for _ in range(count):
        kept = stem[: rng.randrange(1, 20)]
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        found.append(Request((*kept, *tail), rng.randrange(1, len(tail) + 1)))
    return found


def assert_scored(model: Any, asked: list[Request], results: list[Result], atol: float) -> None:
    """The log-probabilities of whole passes, and which targets they have as the best."""
    for request, result in zip(asked, results, strict=True):
        logprobs = naive(model, list(request.tokens))
        first = len(request.tokens) - request.num_targets
        targets = [(logprobs[place - 1], request.tokens[place]) for place in range(first, len(request.tokens))]
        np.testing.assert_allclose(result.logprobs, [row[token] for row, token in targets], atol=atol)
        assert result.is_greedy == tuple(row.argmax() == token for row, token in targets)


def test_what_an_interrupted_step_left_in_the_cache_is_not_used() -> None:
    """In the first layer, not in the second: of a row, and of a tree batch."""
    model, asked = make("llama"), requests(12)
    runner, text = HfRunner(model, {}), tuple(range(1, 13))
    engine = Engine(HfRunner(model, {}), 16)
    runner.run(Step((Row(0, 0, text[:6]),)))
    engine.run(asked)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run(Step((Row(0, 6, text[6:9]),)))
    with pytest.raises(KeyboardInterrupt):
        engine.run(asked)
    hook.remove()
    (logprob,) = runner.run(Step((Row(0, 0, text),), (LogitsRow(0, 11),), ((0, 5),))).target_logprobs
    assert logprob == pytest.approx(naive(model, list(text))[-1, 5], abs=1e-5)
    assert_scored(model, asked, engine.run(asked), 1e-4)


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_runner_that_is_closed_holds_no_weights(is_encoder_decoder: bool) -> None:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes)) if is_encoder_decoder else copy.deepcopy(make("llama"))
    weights = weakref.ref(model.get_input_embeddings().weight)
    runner = HfRunner(model, {})
    del model
    assert weights() is not None
    runner.close()
    gc.collect()
    assert weights() is None


class Deaf(torch.nn.Module):
    """A model to which every token of a step sees those before it, whatever the mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make("llama")
        self.config, self.device, self.dtype = self.inner.config, self.inner.device, self.inner.dtype

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool = True,
        logits_to_keep: Any = 0,
    ) -> Any:
        return self.inner(
            input_ids, past_key_values=past_key_values, use_cache=use_cache, logits_to_keep=logits_to_keep
        )


def test_model_that_scores_tree_batches_wrongly_is_found_by_trying() -> None:
    runner = HfRunner(Deaf(), {})
    assert not runner.traits.tree_batches
    assert "tree batches score" in runner.describe()["notes"][0]


def test_context_is_the_configurations_or_shorter() -> None:
    model = make("llama")
    assert HfRunner(model, {}).traits.context_length == 128
    assert HfRunner(model, {}, max_length=50).traits.context_length == 50
    assert context_length(make("mamba").config) is None
    assert HfRunner(make("mamba"), {}).traits.context_length == 2048
    with refused(ModelError, "too_large", holds=("max_length", "129", "128")):
        HfRunner(model, {}, max_length=129)


def test_a_source_beams_and_what_cannot_be_loaded_are_refused_and_a_failing_device_is_named(tmp_path: Any) -> None:
    runner = HfRunner(make("llama"), {"num_slots_origin": "a reason"})
    engine = Engine(runner, 64)
    with pytest.raises(OliveExtError, match="has no encoder"):
        engine.run([Request((1, 2), 1, source=Source(np.array([1])))])
    with refused(OliveExtError, "unsupported", "num_beams", holds=("2", "1")):
        engine.run([Request((1, 2), 0, Generation(3, beams=Beams(2)))])
    with refused(RunError, "failed", holds=("1", "0")):
        runner.run(Step((Row(0, 0, (VOCAB + 5,)),), (LogitsRow(0, 0),)))
    with pytest.raises(ModelError, match="transformers cannot load"):
        load_model(str(tmp_path), "auto", None)


def test_a_checkpoint_that_lacks_weights_is_refused_and_tied_ones_are_not_missing(tmp_path: Any) -> None:
    """transformers fill them with random numbers: a lossless export was far from its own checkpoint."""
    import transformers

    tied = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True))
    tied.save_pretrained(tmp_path)
    load_model(str(tmp_path), "auto", "cpu")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with refused(ModelError, "damaged", holds=(str(tmp_path), "1 of", "model.layers.1.mlp.up_proj.weight")):
        load_model(str(tmp_path), "auto", "cpu")
