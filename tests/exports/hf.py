"""Random Hugging Face models of every family that the exporters know, small enough for seconds on a CPU.

Run as `python -m tests.exports.hf FAMILY FOLDER` it makes one; the tests call `hf_model`, which does that in a process
of its own and keeps the result.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.exports.cache import once, packages, run_python, source_of
from tests.exports.differing import DIFFERING
from tests.exports.ropes import ROPES
from tests.exports.text import CONTEXT, VOCAB, save_tokenizer

MEDIA = VOCAB - 8
"""From here on token ids stand for images and sounds in the multimodal families; a test's text does not use them."""


@dataclass(frozen=True)
class Family:
    """What `transformers` makes the model from: names of its config class and auto class, and the config's values."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    needs: tuple[str, ...] = ()
    """Releases to make it with, where the installed ones cannot."""


def _numbered(names: str) -> dict[str, int]:
    """Ids of special tokens by their names in a configuration."""
    return {name: MEDIA + number for number, name in enumerate(names.split())}


_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SMALL = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "initializer_range": 0.2, **_IDS}
_SHAPE = {
    **_SMALL,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
_THREE_HEADS = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "initializer_range": 0.08}
HEAD_SIZES = (64, 96, 128, 256, 512)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOW = 16
_GEMMA = {
    **_SHAPE,
    "sliding_window": _WINDOW,
    "tie_word_embeddings": True,
    "rope_parameters": {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "rope_theta": 1e6}},
}
_GEMMA4 = {
    **_GEMMA,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": _ROPE,
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
_GEMMA4_TEXT = {
    **_GEMMA4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_GEMMA4_IDS = _numbered(
    "boi_token_id image_token_id eoi_token_id boa_token_id audio_token_id eoa_token_index video_token_id"
)
_LINEAR = {
    **_SHAPE,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_MROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_QWEN_IDS = _numbered("vision_start_token_id vision_end_token_id image_token_id video_token_id")
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER, "image_size": 32}
_TRANSLATION = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "init_std": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
_OLDER = ("transformers==5.10.4", "tokenizers==0.22.2", "huggingface_hub==1.5.0", "httpx==0.28.1", "httpcore==1.0.9")
"""From 5.11 on, Gemma 4's configuration holds a configuration for each layer, which no exporter can read."""


_GEMMA4_VISION = {
    **_TOWER,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 64,
    "initializer_range": 0.2,
}


def _of_shape(**values: Any) -> dict[str, Any]:
    """A text model's values, its heads as large as its width says."""
    return {**{key: value for key, value in _SHAPE.items() if key != "head_dim"}, **values}


def _with_items(
    config: str, text: dict[str, Any], vision: dict[str, Any], needs: tuple[str, ...] = (), **more: Any
) -> Family:
    """A model that takes pictures."""
    values = {"text_config": text, "vision_config": vision, **more}
    return Family(config, values, "AutoModelForImageTextToText", needs)


def _gemma4(config: str, text: dict[str, Any], vision: dict[str, Any], audio: Any = None, **more: Any) -> Family:
    return _with_items(config, text, vision, _OLDER, audio_config=audio, **more, **_GEMMA4_IDS)


def _gemma3(vision: dict[str, Any], num_tokens: int) -> Family:
    """SigLIP, whose rows are pooled to as many for every picture, which all see each other."""
    return _with_items(
        "Gemma3Config",
        {**_GEMMA, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
        {**_SIGLIP, **vision, "patch_size": 4},
        mm_tokens_per_image=num_tokens,
        **_numbered("boi_token_index image_token_index eoi_token_index"),
    )


def _llava(vision: dict[str, Any], num_tokens: int, layer: int = -1, select: str = "full", **text: Any) -> Family:
    return _with_items(
        "LlavaConfig",
        {**_SHAPE, "model_type": "llama", **text},
        {**_SIGLIP, **vision},
        image_token_index=MEDIA,
        image_seq_length=num_tokens,
        vision_feature_layer=layer,
        vision_feature_select_strategy=select,
        tie_word_embeddings=False,
    )


FAMILIES = {
    "llama": Family("LlamaConfig", _SHAPE),
    # Kernels of attention are chosen by the size of a head; phi-3-mini has 96, Gemma 4's full layers have 512. Three
    # heads: the builder takes a product of as many outputs as the vocabulary has tokens for the LM head.
    **{f"llama_head{size}": Family("LlamaConfig", {**_SHAPE, **_THREE_HEADS, "head_dim": size}) for size in HEAD_SIZES},
    "qwen3": Family("Qwen3Config", _SHAPE),
    # Biases on Q, K and V.
    "qwen2": Family("Qwen2Config", _of_shape()),
    # One weight for Q, K and V, one for gate and up.
    "phi3": Family("Phi3Config", _of_shape(original_max_position_embeddings=CONTEXT)),
    # Every layer looks back 16 tokens.
    "mistral": Family("MistralConfig", {**_SHAPE, "sliding_window": _WINDOW}),
    # Five layers of six look back 16 tokens (the builder's 0.14 knows no other pattern); one KV head.
    "gemma3_text": Family(
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
        },
    ),
    # Attention sinks and experts, every other layer looks back 16 tokens.
    "gpt_oss": Family(
        "GptOssConfig",
        {
            **_SHAPE,
            "sliding_window": _WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    # Layers of two shapes: windowed with 2 KV heads of 16, full with 1 KV head of 32 whose keys are its values.
    "gemma4_unified": _gemma4(
        "Gemma4UnifiedConfig",
        _GEMMA4,
        {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 64, "mm_posemb_size": 16},
    ),
    # The same, and the last two layers use the KV of earlier ones.
    "gemma4_text": Family("Gemma4TextConfig", _GEMMA4_TEXT, needs=_OLDER),
    "gemma4_vl": _gemma4("Gemma4Config", _GEMMA4_TEXT, _GEMMA4_VISION, vision_soft_tokens_per_image=16),
    # The same, and a picture's tokens see each other, as in the larger ones.
    "gemma4_seen": _gemma4(
        "Gemma4Config",
        {**_GEMMA4_TEXT, "use_bidirectional_attention": "vision"},
        _GEMMA4_VISION,
        vision_soft_tokens_per_image=16,
    ),
    # The same with sound; mobius 0.1.0 has the published numbers of heads and of frames that see each other built in.
    "gemma4_any": _gemma4(
        "Gemma4Config",
        _GEMMA4_TEXT,
        _GEMMA4_VISION,
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "subsampling_conv_channels": [128, 4],
            "output_proj_dims": 64,
            "initializer_range": 0.2,
        },
        vision_soft_tokens_per_image=16,
    ),
    "qwen2_5_vl": _with_items(
        "Qwen2_5_VLConfig",
        {**_SHAPE, "rope_parameters": _MROPE},
        {**_VISION, "fullatt_block_indexes": [1], "window_size": 32},
        **_QWEN_IDS,
        **_IDS,
        tie_word_embeddings=False,
    ),
    # Features of inner layers of the tower are added to the decoder's first layers; mobius 0.1.0 leaves them out.
    "qwen3_vl": _with_items(
        "Qwen3VLConfig",
        {**_SHAPE, "tie_word_embeddings": True, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_QWEN_IDS,
        **_IDS,
        tie_word_embeddings=True,
    ),
    # Three layers of four keep a convolution's and a recurrence's state instead of KV.
    "qwen3_5": _with_items(
        "Qwen3_5Config",
        {**_LINEAR, "rope_parameters": {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5}},
        {**_VISION, "num_position_embeddings": 16},
        **_QWEN_IDS,
        **_IDS,
        tie_word_embeddings=False,
    ),
    # A projector over SigLIP's rows: mobius 0.1.0 gives CLIP no class token.
    "llava": _llava({"patch_size": 8, "vision_use_head": False}, 16),
    # LLaVA 1.5: CLIP's rows before its last layer, without that of the class token.
    "llava_clip": _llava(
        {"model_type": "clip_vision_model", "num_hidden_layers": 3, "patch_size": 8, "projection_dim": 32},
        16,
        layer=-2,
        select="default",
    ),
    # SigLIP base and the layers of Qwen2.5-0.5B, for docs/benchmarks.
    "llava_base": _llava(
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 224,
            "patch_size": 16,
            "vision_use_head": False,
        },
        196,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        head_dim=64,
        initializer_range=0.03,
    ),
    "gemma3": _gemma3({}, 16),
    # As many rows for a picture as onnxruntime-genai takes for granted, for docs/benchmarks.
    "gemma3_256": _gemma3({"image_size": 128}, 256),
    # Speech: seconds of sound are 13 rows each, which see those of two seconds.
    "qwen3_asr": Family(
        "Qwen3ASRConfig",
        {
            "text_config": {**_SHAPE, "model_type": "qwen3", "rope_parameters": _ROPE},
            "audio_config": {
                "model_type": "qwen3_asr_encoder",
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "d_model": 32,
                "downsample_hidden_size": 8,
                "output_dim": 64,
                "n_window_infer": 200,
                "initializer_range": 0.2,
            },
            "initializer_range": 0.2,
            "audio_token_id": MEDIA + 1,
            **_IDS,
            "tie_word_embeddings": False,
        },
        auto="AutoModelForMultimodalLM",
    ),
    "qwen3_5_text": Family("Qwen3_5TextConfig", _LINEAR),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        {
            **_LINEAR,
            **_EXPERTS,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [],
        },
    ),
    "qwen3_moe": Family("Qwen3MoeConfig", {**_SHAPE, **_EXPERTS}),
    # Short convolutions and attention.
    "lfm2": Family(
        "Lfm2Config",
        _of_shape(
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
        ),
    ),
    # No attention at all.
    "mamba": Family(
        "MambaConfig",
        {**_IDS, "vocab_size": VOCAB, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4}
        | {"tie_word_embeddings": False, "initializer_range": 0.2},
    ),
    # Attention and selective state spaces by turns; without experts, whose weights mobius would scale to a sum of one.
    "jamba": Family(
        "JambaConfig",
        _of_shape(
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=1,
            num_experts=1,
            num_experts_per_tok=1,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
    ),
    # Mamba 2, MLP and attention layers by turns.
    "nemotron_h": Family(
        "NemotronHConfig",
        {
            **_SHAPE,
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
        },
        needs=_OLDER,
    ),
    "gpt2": Family(
        "GPT2Config",
        {**_IDS, "vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
        | {"initializer_range": 0.2},
    ),
    "t5": Family(
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "n_positions": CONTEXT,
            # Untied, transformers 4 and 5 read a configuration of the other's differently: whether outputs are scaled.
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        },
        auto="AutoModelForSeq2SeqLM",
    ),
    "marian": Family("MarianConfig", _TRANSLATION, auto="AutoModelForSeq2SeqLM"),
    "whisper": Family(
        "WhisperConfig",
        {
            **{key: value for key, value in _TRANSLATION.items() if key != "max_position_embeddings"},
            "bos_token_id": 2,
            "decoder_start_token_id": 2,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "max_target_positions": 64,
            "suppress_tokens": [],
            "begin_suppress_tokens": [],
        },
        auto="AutoModelForSpeechSeq2Seq",
    ),
    **{name: Family(config, _of_shape(**values)) for name, (config, values) in {**ROPES, **DIFFERING}.items()},
}


def hf_model(family: str) -> Path:
    """A Hugging Face folder with a random model of the family, fp32, and its tokenizer."""
    made = FAMILIES[family]
    path = [packages(*made.needs)] if made.needs else []
    recipe = [made.config, made.values, made.auto, made.needs, source_of("text.py")]
    if family == "nemotron_h":
        recipe.append("embeddings renamed")
    if family == "gemma3":
        recipe.append("projector drawn")
    return once(f"hf-{family}", recipe, lambda folder: run_python(["-m", __name__, family, folder], path=path))


def make(family: Family, folder: Path) -> None:
    """Write the model, the same for the same family on every machine."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, family.config)(**family.values)
    model = getattr(transformers, family.auto).from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases start as zeros, norms as ones: a lost one would not be seen
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif not parameter.any():  # Gemma 3's projector starts as zeros: no picture would make a difference
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    if family.config == "NemotronHConfig":
        _rename_embeddings(folder / "model.safetensors")


def _rename_embeddings(file: Path) -> None:
    """The name that published models have and that other releases read; 5.10 writes `backbone.embedding.weight`."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    weights["backbone.embeddings.weight"] = weights.pop("backbone.embedding.weight")
    save_file(weights, file, metadata={"format": "pt"})


if __name__ == "__main__":
    make(FAMILIES[sys.argv[1]], Path(sys.argv[2]))
