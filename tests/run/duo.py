"""Two tiny torch models behind one tokenizer as the models of a comparison, asked by full forward passes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.config import EvaluationConfig
from olive_ext.engine.requests import Request, Result
from olive_ext.run.machine import Clock
from olive_ext.run.reference.observer import Observer
from olive_ext.run.sample_logs import Fields
from olive_ext.session import Session
from tests.backends.reference import ForwardEngine, model
from tests.session.tiny import TEMPLATE, byte_level


@functools.cache
def perturbed(noise: float) -> Any:
    """The tiny model with noise on its LM head."""
    other = copy.deepcopy(model())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        weight = other.lm_head.weight
        weight += noise * torch.randn(weight.shape, generator=generator)
    return other


def logprobs(net: Any, tokens: Sequence[int]) -> np.ndarray:
    """Next-token log-probabilities [S, V] in float64."""
    return _logprobs(net, tuple(tokens))


@functools.cache
def _logprobs(net: Any, tokens: tuple[int, ...]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(net(torch.tensor([tokens])).logits[0].double().log_softmax(-1).numpy())


def compared(reference: Any, candidate: Any, tokens: Sequence[int], num_targets: int) -> SimpleNamespace:
    """Both models at the last `num_targets` of `tokens`, from the whole distributions."""
    p, q = (logprobs(net, tokens[:-1])[-num_targets:] for net in (reference, candidate))
    rows, targets = np.arange(num_targets), np.array(tokens[-num_targets:])
    top = p.argmax(1)
    kl = (np.exp(p) * (p - q)).sum(1)
    return SimpleNamespace(
        kl=kl,
        kl_variance=np.zeros(num_targets),
        kl_lower=kl,
        kl_reverse=(np.exp(q) * (q - p)).sum(1),
        tail_mass=np.zeros(num_targets),
        reference_logprobs=p[rows, targets],
        reference_is_greedy=top == targets,
        same_top=top == q.argmax(1),
        reference_top_logprobs=p[rows, top],
        top_logprobs=q[rows, top],
        logprobs=q[rows, targets],
        positions=len(tokens) - num_targets + rows,
    )


class NetEngine(ForwardEngine):
    """`ForwardEngine` on any of the two."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.generated: list[Request] = []

    def _answer(self, request: Request) -> Result:
        if request.generation is not None:
            return self._generate_on_net(request)
        found = logprobs(self.net, request.tokens[:-1])[-request.num_targets :]
        targets = np.array(request.tokens[-request.num_targets :])
        picked = found[np.arange(len(targets)), targets]
        return Result(tuple(picked.tolist()), tuple((found.argmax(1) == targets).tolist()))

    def _generate_on_net(self, request: Request) -> Result:
        made: list[int] = []
        self.generated.append(request)
        for _ in range(request.generation.max_new_tokens):
            made.append(int(logprobs(self.net, (*request.tokens, *made))[-1].argmax()))
        return Result(tokens=tuple(made))


class NetSession(Session):
    """A session on `net`; with a `reference` every target is compared with it."""

    def __init__(self, net: Any, reference: Any = None) -> None:
        super().__init__(NetEngine(net), byte_level(True, TEMPLATE))
        self.net = net
        self.reference = None if reference is None else NetSession(reference)

    def run_slices(self, call: Any, slices: Any, whose: Any = None) -> Any:
        asked = [item for part in slices for item in part]
        outputs = dict(super().run_slices(call, [asked], whose))
        for key, one in asked:
            output = outputs[key]
            if self.reference is None or call == "generate":
                yield key, output
            else:
                ids = (one.prefix, *one.text) if call == "loglikelihood_rolling" else (*one.context, *one.target)
                found = compared(self.reference.net, self.net, ids, output.token_count)
                yield key, replace(output, compared=found)


class TwoModels:
    """`Models` of a run: the reference is the tiny model, the candidate one that was changed."""

    reference = given_reference = SimpleNamespace(kind="onnx", size=None, files=SimpleNamespace(variant=""))
    progress = is_same_model = other_template = False
    recorder = records_file = prompt_diff = None

    def __init__(self, candidate: Any, config: EvaluationConfig) -> None:
        self.config = config
        self.clock = Clock()
        self.net = candidate
        self.opened: list[str] = []
        self.fields: Fields | None = None
        self.task_run: Any = None

    def export_note(self, path: str) -> dict[str, str]:
        return {}

    def open_reference(self, observer: Observer | None) -> Any:
        self.opened.append("reference")
        return OrtLM(session=NetSession(model()), observer=observer)

    def open_candidate(self, observer: Observer | None = None) -> Any:
        self.opened.append("candidate")
        return OrtLM(session=NetSession(self.net, None if observer is None else model()), observer=observer)

    def stops(self, lm: Any) -> None:
        """Not known of sessions on nets."""

    def keep_answers(self, lm: Any) -> None:
        """Keeps none."""

    def open_resident(self, candidate: Any, observer: Observer) -> Any:
        self.opened.append("resident")
        return OrtLM(session=NetSession(model()), observer=observer)
