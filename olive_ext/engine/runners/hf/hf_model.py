"""The door to transformers' models and their caches. Knows no step."""

from __future__ import annotations

from typing import Any

from olive_ext.errors import ModelError, why_not_loaded

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
"""Names of the context's length in configurations, in the order in which they are looked for."""

DEFAULT_LENGTH = 2048
"""Context where a configuration names none (a recurrent model), as in lm-eval's HFLM."""


def load_model(
    where: str, dtype: str, device: str | None, num_threads: int | None = None, *, trust_remote_code: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The model in folder (or under hub name) `where`, in eval mode, and facts of it. `dtype` is "auto" (the file's
    own), "float32", "float16" or "bfloat16"; `num_threads` are torch's, for the whole process. Raises `ModelError` for
    what cannot be loaded as a causal language model.
    """
    import torch
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    trust = {"trust_remote_code": trust_remote_code}
    try:
        config: Any = AutoConfig.from_pretrained(where, **trust)
        sees = hasattr(config, "vision_config") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        load: Any = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained
        number_type = dtype if dtype == "auto" else getattr(torch, dtype)
        is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
        model = None if is_encoder_decoder else load(where, dtype=number_type, **trust)
    except Exception as error:
        raise ModelError(f"transformers cannot load '{where}' as a causal model: {why_not_loaded(error)}") from error
    if model is None:
        raise ModelError(f"'{where}' is an encoder-decoder, which is not run on transformers here: give an ONNX model")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    placed = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    why = "a model in its original form runs one sequence at a time"
    facts = {"model": where, "revision": getattr(model.config, "_commit_hash", None), "num_slots_origin": why}
    dtype_name = str(placed.dtype).removeprefix("torch.")
    return placed, {**facts, "runtime": "transformers", "dtype": dtype_name, "device": str(placed.device)}


def context_length(config: Any) -> int | None:
    """Positions that the configuration names; None where it names none."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = (getattr(text, name, None) for name in _LENGTHS)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def new_cache(config: Any) -> Any:
    """An empty cache for a model of that configuration."""
    from transformers import DynamicCache

    return DynamicCache(config=config)


def is_croppable(cache: Any) -> bool:
    """Whether every layer keeps all positions, so that it can be cut back to any of them."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)
