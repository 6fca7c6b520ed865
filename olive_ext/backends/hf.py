"""The baseline: lm-eval's Hugging Face backend, set up so that its numbers are fit to compare with.

Knows no ONNX model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from olive_ext.backends.failures import one_line
from olive_ext.errors import ConfigError, ModelError, OliveExtError

CPU_BATCH_SIZE = 8
"""On a CPU "auto" would first run 64 sequences of full length."""


def open_hf(
    model: Any,
    *,
    tokenizer: Any = None,
    device: str | None = None,
    batch_size: int | str = "auto",
    max_length: int | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> HFLM:
    """HFLM for a path, a hub name, or a loaded model with its tokenizer.

    The log-softmax is taken in float32 whatever the weights are: in half precision a score of 30 tokens moves by up to
    a nat. `model_args` go to HFLM's constructor and win over the other arguments. Raises `ModelError`, `ConfigError`.
    """
    place = _torch_device(device) if isinstance(model, str) else str(model.device)
    arguments = {
        "pretrained": model,
        "tokenizer": tokenizer,
        "device": place,
        "batch_size": CPU_BATCH_SIZE if str(batch_size).startswith("auto") and place == "cpu" else batch_size,
        "max_length": max_length,
        "softmax_dtype": "float32",
        **(model_args or {}),
    }
    try:
        return HFLM(**arguments)
    except OliveExtError:
        raise
    except TypeError as error:
        raise ConfigError(f"'model_args' = {dict(model_args or {})!r}: {one_line(error)}") from error
    except Exception as error:
        name = model if isinstance(model, str) else type(model).__name__
        raise ModelError(f"the Hugging Face model '{name}' cannot be opened: {one_line(error)}") from error


def answers_key(lm: LM) -> str:
    """Digest (16 hex digits) of all that decides an answer besides the request: weights, tokenizer, arguments.

    Raises `ConfigError` for a model that is not HFLM's: what it answers from is not known here.
    """
    if not isinstance(lm, HFLM):
        raise ConfigError(f"'use_cache' needs a model of this package or lm-eval's HFLM, not {type(lm).__name__}")
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in lm.model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    backend = getattr(lm.tokenizer, "backend_tokenizer", None)
    facts = {
        "tokenizer": backend.to_str() if backend is not None else sorted(lm.tokenizer.get_vocab().items()),
        "max_length": lm.max_length,
        "add_bos_token": lm.add_bos_token,
        "prefix_token_id": lm.custom_prefix_token_id,
        "think_end_token": lm.think_end_token,
        "softmax_dtype": str(lm.softmax_dtype),
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _torch_device(device: str | None) -> str:
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    name = "cuda" if device.lower() == "gpu" else device
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigError(f"'device' = {device!r}: torch knows no such device; for instance 'cpu', 'cuda:0'") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"'device' = {device!r}: torch sees no CUDA device here")
    return name
