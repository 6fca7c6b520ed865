"""A tiny Llama with random weights, lm-eval's HFLM on it, and an engine that answers from the very same weights by a
full forward pass for every question."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.engine.requests import Counters, KeyedRequest, KeyedResult, Request, Result
from olive_ext.session import Session
from tests.session.fake_engine import FakeEngine
from tests.session.tiny import BOS, EOS, IM_END, TEMPLATE, byte_level

MAX_LENGTH = 48


@functools.cache
def model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.35,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


class ForwardEngine(FakeEngine):
    """Knows no cache and no batch. After `fails_after` results it raises `error`."""

    def __init__(self, context_length: int = MAX_LENGTH) -> None:
        super().__init__(context_length, slots=1)
        self.counters = Counters()
        self.fails_after: int | None = None
        self.error: BaseException = KeyboardInterrupt()
        self.script: Callable[[Request], Sequence[int]] | None = None

    def run_slices(self, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        """One by one, as the results are read."""
        yield from ((key, self._answer(request)) for items in slices for key, request in reversed(items))

    def describe(self) -> dict[str, Any]:
        return {"providers": ["CPUExecutionProvider"], "num_slots": 1}

    def _answer(self, request: Request) -> Result:
        if self.fails_after is not None and len(self.requests) >= self.fails_after:
            raise self.error
        tokens = request.tokens
        assert len(tokens) - (request.generation is None) <= self.context_length
        self.requests.append(request)
        self.counters.tokens_fed += len(tokens)
        if request.generation is not None:
            return self._generate(request)
        logprobs = _logprobs(tuple(tokens[:-1]))[-request.num_targets :]
        targets = torch.tensor(tokens[-request.num_targets :])
        picked = logprobs.gather(1, targets[:, None])[:, 0]
        return Result(tuple(picked.tolist()), tuple((logprobs.argmax(1) == targets).tolist()))

    def _said(self, request: Request, tokens: Sequence[int]) -> Iterator[int]:
        if self.script is not None:
            yield from (*self.script(request), EOS)
        sampling = request.generation.sampling
        while True:
            row = _logprobs((*request.tokens, *tokens))[-1]
            if sampling.is_greedy:
                yield int(row.argmax())
            else:
                generator = torch.Generator().manual_seed(sampling.seed + len(tokens))
                yield int(torch.multinomial((row / sampling.temperature).softmax(0), 1, generator=generator))


@functools.cache
def _logprobs(tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return model()(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)


def session(has_bos: bool = True, engine: ForwardEngine | None = None, template: str | None = TEMPLATE) -> Session:
    return Session(engine or ForwardEngine(), byte_level(has_bos, template))


def ort_lm(has_bos: bool = True, engine: ForwardEngine | None = None, **arguments: Any) -> OrtLM:
    return OrtLM(session=session(has_bos, engine), **arguments)


def hflm(has_bos: bool = True, **arguments: Any) -> HFLM:
    """Without its cache of logits, which answers wrongly where merged requests differ in target length."""
    given = {"batch_size": 4, "max_length": MAX_LENGTH, "logits_cache": False, **arguments}
    return HFLM(pretrained=model(), tokenizer=byte_level(has_bos, TEMPLATE).hf, **given)


def instances(kind: str, arguments: Sequence[tuple[Any, ...]], repeats: int = 1) -> list[Instance]:
    made = [Instance(kind, {}, args, index, ("task", index, repeats)) for index, args in enumerate(arguments)]
    return [instance for instance in made for _ in range(repeats)]


__all__ = ["BOS", "EOS", "IM_END", "ForwardEngine", "hflm", "instances", "model", "ort_lm", "session"]
