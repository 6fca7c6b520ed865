"""Families whose exports compute something else than their checkpoints: what exporters leave out of them."""

from __future__ import annotations

from typing import Any

WINDOW = 16
"""Tokens that a windowed layer looks back."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
_WINDOWED = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}

DIFFERING: dict[str, tuple[str, dict[str, Any]]] = {
    # Every other layer is windowed, attention and logits are capped.
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        | {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "olmo3": ("Olmo3Config", _WINDOWED),
    # Rotary positions turn neighbours, not halves of a head.
    "cohere": ("CohereConfig", {"tie_word_embeddings": True, "logit_scale": 0.25}),
    # Full layers have no rotary positions.
    "cohere2": ("Cohere2Config", {**_WINDOWED, "head_dim": 16, "tie_word_embeddings": True}),
    "exaone4": ("Exaone4Config", {**_WINDOWED, "sliding_window_pattern": 4}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 32,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
        },
    ),
    "falcon_alibi": ("FalconConfig", {"alibi": True, "new_decoder_architecture": False, "multi_query": False}),
    "olmo_clipped": ("OlmoConfig", {"clip_qkv": 0.5}),
    "llama_yarn": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": _YARN}),
    "llama_yarn_factor": ("LlamaConfig", {"rope_parameters": {**_YARN, "attention_factor": 1.5}}),
    "nemotron": ("NemotronConfig", {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
}
"""By family the name of transformers' configuration, and its values beside the common small ones."""
