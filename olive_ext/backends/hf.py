"""What lm-eval's own Hugging Face backend, which a caller hands over, answers from; and torch's devices.

Knows no ONNX model.
"""

from __future__ import annotations

import hashlib
import json

import torch
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from olive_ext.backends.package_versions import versions
from olive_ext.errors import ConfigError, UnsupportedError


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
