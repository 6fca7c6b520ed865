"""Configurations of models whose positions are scaled: for a whole step by its longest row, or each by its own place.

First maxima are small, so that short texts cross them, and factors far apart, so that the wrong ones are seen.
"""

from __future__ import annotations

from typing import Any

ORIGINAL = 60
"""The first maximum: positions that these models would first have been trained for."""
FURTHER = 300
"""The same where a chunk of 256 tokens is shorter."""


def _factors(half: int, least: float, most: float) -> list[float]:
    """One for each rotated pair, growing as published ones do."""
    return [round(least * (most / least) ** (at / max(half - 1, 1)), 4) for at in range(half)]


def _longrope(rotary: int, original: int, **more: Any) -> dict[str, Any]:
    """`rope_parameters` and what published Phi configurations say beside them."""
    half = rotary // 2
    parameters = {
        "rope_type": "longrope",
        "type": "longrope",  # as published configurations say it, and as the builder reads it
        "rope_theta": 10000.0,
        "short_factor": _factors(half, 1.0, 1.5),
        "long_factor": _factors(half, 1.6, 24.0),
        "original_max_position_embeddings": original,
        **more,
    }
    return {"rope_parameters": parameters, "original_max_position_embeddings": original}


def _scaled(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **values}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": ORIGINAL}

_NO_GROUPS = {"num_key_value_heads": 4, "intermediate_size": 256}
"""As many KV heads as heads, and the width that these configurations do not name."""

ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3_longrope": ("Phi3Config", _longrope(16, ORIGINAL)),
    # Texts behind the first maximum need more than one chunk.
    "phi3_further": ("Phi3Config", {**_longrope(16, FURTHER), "max_position_embeddings": 1280}),
    # Phi-4-mini: three quarters of a head are rotated.
    "phi4_mini": (
        "Phi3Config",
        {
            **_longrope(48, ORIGINAL, partial_rotary_factor=0.75),
            "partial_rotary_factor": 0.75,
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "initializer_range": 0.12,  # twice as wide: with 0.2 rounding reaches 1e-4 nats
        },
    ),
    # Frequencies follow the length of the whole step, from the maximum on.
    "llama_dynamic": ("LlamaConfig", {**_scaled("dynamic", factor=4.0), "max_position_embeddings": ORIGINAL}),
    "llama_yarn": ("LlamaConfig", _scaled("yarn", **_YARN)),
    "llama_linear": ("LlamaConfig", _scaled("linear", factor=8.0)),
    "llama_scaled": ("LlamaConfig", _scaled("llama3", **_LLAMA3)),
    # Queries grow with their own place.
    "ministral3": (
        "Ministral3Config",
        {
            **_scaled("yarn", **_YARN, llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=1.0),
            "sliding_window": None,
        },
    ),
    "bloom": ("BloomConfig", {**_NO_GROUPS, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptConfig", {**_NO_GROUPS, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
}

FIRST_MAXIMUM = {"phi3_longrope": ORIGINAL, "phi3_further": FURTHER, "phi4_mini": ORIGINAL}
"""Tokens that the short factors hold for, of families whose factors are a whole step's."""
