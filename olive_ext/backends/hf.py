"""The baseline: lm-eval's Hugging Face backend, set up so that its numbers are fit to compare with.

Knows no ONNX model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from transformers import LogitsProcessorList

from olive_ext.backends.lm_eval.instances import CompletePairs
from olive_ext.backends.package_versions import versions
from olive_ext.config import ExecutionSettings
from olive_ext.errors import (
    ANY_FAILURE,
    ConfigError,
    ModelError,
    NonFiniteError,
    OliveExtError,
    UnsupportedError,
    named_failures,
    one_line,
    why_not_loaded,
)
from olive_ext.session.tokenizer import Tokenizer

CPU_BATCH_SIZE = 8
"""Batch size on a CPU, where "auto" would first run 64 sequences of full length."""


class Baseline(CompletePairs, HFLM):  # type: ignore[misc]
    """HFLM with the definitions of `OrtLM`, so that both may stand in one table.

    Differs from HFLM in what HFLM gets wrong: BOS is not scored as text in rolling log-likelihoods (`hflm_rolling_bos`
    brings that back), requests of different target lengths are not answered from one another's rows, and a token that
    spans the join of context and continuation is scored instead of failing.
    """

    kind = "hf"

    def __init__(
        self, *args: Any, hflm_rolling_bos: bool = False, reports_non_finite: bool = False, **options: Any
    ) -> None:
        """`reports_non_finite`: outputs that are NaN or infinite are counted instead of raising `NonFiniteError`."""
        super().__init__(*args, **options)
        self._reports_non_finite = reports_non_finite
        self._hflm_rolling_bos = hflm_rolling_bos
        self._drops_prefix = False
        self.counters = {"requests": 0, "tokens_naive": 0, "tokens_generated": 0, "non_finite": 0}
        where, prefix = str(getattr(self.tokenizer, "name_or_path", "")), self.custom_prefix_token_id
        self._text = Tokenizer(self.tokenizer, where, add_bos_token=self.add_bos_token, prefix_token_id=prefix)

    def tok_encode(self, string: str, *args: Any, **options: Any) -> list[int]:
        """HFLM's; while a rolling log-likelihood is prepared, without the prefix token in front."""
        ids: list[int] = super().tok_encode(string, *args, **options)
        return ids[1:] if self._drops_prefix and ids[:1] == [self.prefix_token_id] else ids

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability in nats of each whole text."""
        self._drops_prefix = not self._hflm_rolling_bos
        try:
            answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self._drops_prefix = False
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Any], *args: Any, **options: Any) -> list[tuple[float, bool]]:
        """HFLM's, with every log-probability looked at."""
        answers = self._ask_tokens(requests, *args, **options)
        for (key, _, _), (logprob, _) in zip(requests, answers, strict=True):
            if not logprob < math.inf:
                self._note_non_finite(1, f"request {key!r}: its log-probability is {logprob}")
        return answers

    def _ask_tokens(self, requests: Sequence[Any], *args: Any, **options: Any) -> list[tuple[float, bool]]:
        """HFLM's, in one call for each target length where requests of several lengths would be merged."""
        ask: Callable[..., list[tuple[float, bool]]] = super()._loglikelihood_tokens
        self.counters["requests"] += len(requests)
        self.counters["tokens_naive"] += sum(len(context) + len(target) - 1 for _, context, target in requests)
        lengths = [len(target) for _, _, target in requests]
        by_input: dict[tuple[int, ...], int] = {}
        inputs = [(*context, *target[:-1]) for _, context, target in requests]
        if all(by_input.setdefault(fed, length) == length for fed, length in zip(inputs, lengths, strict=True)):
            return ask(requests, *args, **options)
        answers: dict[int, tuple[float, bool]] = {}
        for length in sorted(set(lengths)):
            chosen = [index for index, own in enumerate(lengths) if own == length]
            answers |= zip(chosen, ask([requests[index] for index in chosen], *args, **options), strict=True)
        return [answers[index] for index in range(len(requests))]

    def _model_generate(self, context: Any, *args: Any, **options: Any) -> Any:
        """HFLM's, counted, with every distribution looked at that a token is taken from."""
        wrong = torch.zeros(context.shape[0], dtype=torch.bool, device=context.device)

        def look(ids: Any, logits_BV: Any) -> Any:
            wrong.logical_or_(~(logits_BV < math.inf).all(-1).to(wrong.device))
            return logits_BV

        tokens = super()._model_generate(context, *args, logits_processor=LogitsProcessorList([look]), **options)
        if number := int(wrong.sum()):
            together = f"{number} of {len(wrong)} texts generated together"
            self._note_non_finite(number, f"{together} have logits of NaN or infinity")
        mask = options.get("attention_mask")
        self.counters["requests"] += context.shape[0]
        self.counters["tokens_naive"] += int(context.numel() if mask is None else mask.sum())
        self.counters["tokens_generated"] += tokens.numel() - context.numel()
        return tokens

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        """HFLM's; raises `ConfigError` where the template fails."""
        doing = f"the chat template of '{self.tokenizer.name_or_path}' cannot render the messages"
        with named_failures(doing, kind=ConfigError, machine=()):
            return str(super().apply_chat_template(*args, **options))

    def _note_non_finite(self, number: int, description: str) -> None:
        """Counts requests whose output is not finite, or raises `NonFiniteError`."""
        if not self._reports_non_finite:
            raise NonFiniteError(f"the Hugging Face model's output is not finite: {description[:300]}")
        self.counters["non_finite"] += number


def open_baseline(
    model: Any, settings: ExecutionSettings, model_args: Mapping[str, Any] | None = None, tokenizer: Any = None
) -> Baseline:
    """The baseline for a path, a hub name, or a loaded model with its `tokenizer`.

    The log-softmax is taken in float32 whatever the weights are: in half precision a score of 30 tokens moves by up to
    a nat. `model_args` are further arguments of the constructor (HFLM's), and win over the others here. Raises
    `ModelError` or `ConfigError`.
    """
    if isinstance(model, str):
        default = "cuda" if torch.cuda.is_available() else "cpu"
        without_cuda = f"'device' = {settings.device!r}: torch sees no CUDA device here"
        torch_name = torch_device(default if settings.device is None else settings.device, without_cuda)
    else:
        torch_name = str(model.device)
    is_small = str(settings.batch_size).startswith("auto") and torch_name == "cpu"
    arguments = {
        "pretrained": model,
        "tokenizer": settings.tokenizer if tokenizer is None else tokenizer,
        "device": torch_name,
        "batch_size": CPU_BATCH_SIZE if is_small else settings.batch_size,
        "max_length": settings.max_length,
        "softmax_dtype": "float32",
        "reports_non_finite": settings.non_finite == "report",
        "trust_remote_code": settings.trust_remote_code,
        **(model_args or {}),
    }
    try:
        return Baseline(**arguments)
    except OliveExtError:
        raise
    except TypeError as error:
        raise ConfigError(f"'model_args' = {dict(model_args or {})!r}: {one_line(error)}", "model_args") from error
    except ANY_FAILURE as error:
        name = model if isinstance(model, str) else type(model).__name__
        raise ModelError(f"the Hugging Face model '{name}' cannot be opened: {why_not_loaded(error)}") from error


def answers_key(lm: LM) -> str:
    """Digest (16 hex digits) of all that decides an answer besides the request: weights, configurations, code (the name
    of a module of a checkpoint's own has the digest of its source), tokenizer, arguments.

    Raises `ConfigError` for a model that is not HFLM's: what it answers from is not known here.
    """
    if not isinstance(lm, HFLM):
        raise ConfigError(f"needs a model of this package or lm-eval's HFLM, not {type(lm).__name__}", "use_cache")
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in lm.model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    backend = getattr(lm.tokenizer, "backend_tokenizer", None)
    configs = (lm.model.config.to_dict(), lm.model.generation_config.to_dict())
    kinds = [type(part) for part in lm.model.modules()]
    facts = {
        "versions": versions(),
        "configs": [{key: value for key, value in one.items() if key != "_name_or_path"} for one in configs],
        "classes": sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}),
        "tokenizer": backend.to_str() if backend is not None else sorted(lm.tokenizer.get_vocab().items()),
        "max_length": lm.max_length,
        "add_bos_token": lm.add_bos_token,
        "prefix_token_id": lm.custom_prefix_token_id,
        "think_end_token": lm.think_end_token,
        "softmax_dtype": str(lm.softmax_dtype),
        "hflm_rolling_bos": getattr(lm, "_hflm_rolling_bos", True),
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def torch_device(device: str, without_cuda: str) -> str:
    """torch's name of `device`, where "gpu" means "cuda".

    Raises `ConfigError` for a device that torch does not know, and with the message `without_cuda` for a CUDA device
    where torch sees none.
    """
    name = "cuda" if device.lower() == "gpu" else device
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigError(
            "torch knows 'cpu' and 'cuda:0', for instance", "device", device, code="unknown_name"
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(without_cuda)
    return name
