"""Every export there is, by name: family, exporter, its release where there are two, and what is special."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.exports.genai import genai_export
from tests.exports.hf import hf_model
from tests.exports.mobius import mobius_export
from tests.exports.olive import surgery_export
from tests.exports.optimum import optimum_export


@dataclass(frozen=True)
class Recipe:
    """How an export is made, and what is known of it before."""

    family: str
    exporter: str
    """With its release: "genai 0.18.0"."""
    make: Callable[[], Path]
    dtype: str = "fp32"
    """Of weights and computation: fp32, fp16, bf16, int4, int8."""
    kv_dtype: str = ""
    """Of the cache, where it is not that of the computation, fp32 for integer weights."""
    not_on_cpu: str = ""
    """Why ONNX Runtime's CPU provider cannot run it; empty where it can."""
    differs: str = ""
    """Why it does not compute what its source computes; empty where it does."""
    one_token: bool = False
    """The graph takes one token a run, although the length of its input is symbolic."""


@dataclass(frozen=True)
class Export:
    """An export that exists; what is known of it as in its recipe."""

    name: str
    path: Path
    """The package's folder."""
    hf: Path
    """The Hugging Face folder it was made from: the reference."""
    family: str
    exporter: str = ""
    dtype: str = "fp32"
    kv_dtype: str = "fp32"
    not_on_cpu: str = ""
    differs: str = ""
    one_token: bool = False
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    """Where a plain session runs it."""


GENAI_14, GENAI_18 = "0.14.1", "0.18.0"
GENAI = {"0.14": GENAI_14, "0.18": GENAI_18}
_NO_PAGED = "PagedAttention has no CPU kernel"
_NO_BF16 = "MatMul has no bfloat16 CPU kernel"
_NO_NORMS = "GroupQueryAttention on the CPU refuses norms of Q and K"
_TABLES = "both tables in one and nothing that chooses: behind the short one the long one begins at its first row"
_NO_FP8 = "GroupQueryAttention has no CPU kernel for an fp8 cache"


def _genai(
    family: str, release: str = GENAI_18, dtype: str = "fp32", provider: str = "cpu", *options: str, **known: str
) -> Recipe:
    """`known`: other fields of the recipe."""
    make = partial(genai_export, family, release, dtype, provider, options)
    return Recipe(family, f"genai {release}", make, dtype, **known)


def _mobius(family: str, dtype: str = "fp32", static_cache: int = 0, provider: str = "default", **known: Any) -> Recipe:
    """`known`: other fields of the recipe."""
    short = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}[dtype]
    return Recipe(family, "mobius 0.1.0", partial(mobius_export, family, short, static_cache, provider), dtype, **known)


def _optimum(family: str, merged: bool = False) -> Recipe:
    return Recipe(family, "optimum-onnx 0.1.0", partial(optimum_export, family, merged))


def _surgery(family: str, surgeon: str) -> Recipe:
    return Recipe(family, "olive", partial(surgery_export, family, surgeon))


CATALOG: dict[str, Recipe] = {
    **{f"{family}-genai-0.14": _genai(family, GENAI_14) for family in ("llama", "qwen3", "mistral", "gemma3_text")},
    **{f"{family}-genai-0.14": _genai(family, GENAI_14) for family in ("qwen2_5_vl", "qwen3_5", "lfm2")},
    **{f"{family}-genai-0.18": _genai(family) for family in ("llama", "qwen3", "qwen2", "phi3", "gpt_oss")},
    **{f"{family}-genai-0.18": _genai(family) for family in ("gemma3_text", "gemma4_unified", "qwen2_5_vl", "qwen3_5")},
    **{f"{family}-genai-0.18": _genai(family) for family in ("lfm2", "whisper")},
    "mistral-genai-0.18": _genai("mistral", differs="genai_config.json has the window of 16, the graph does not"),
    "llama-genai-0.14-int4": _genai("llama", GENAI_14, "int4"),
    "llama-genai-0.18-int4": _genai("llama", GENAI_18, "int4"),
    "llama-genai-0.18-int8": _genai("llama", GENAI_18, "int8"),
    "llama-genai-0.18-int4-qdq": _genai("llama", GENAI_18, "int4", "cpu", "use_qdq=true"),
    "llama-genai-0.18-fp16-cpu": _genai("llama", GENAI_18, "fp16"),
    "llama-genai-0.18-fp32-webgpu": _genai("llama", GENAI_18, "fp32", "webgpu", "use_webgpu_fp32=true"),
    "llama-genai-0.18-embeds": _genai("llama", GENAI_18, "fp32", "cpu", "exclude_embeds=true"),
    "llama-genai-0.18-pruned": _genai("llama", GENAI_18, "fp32", "cpu", "prune_lm_head=true"),
    "llama-genai-0.18-hidden": _genai("llama", GENAI_18, "fp32", "cpu", "include_hidden_states=true"),
    "qwen3-genai-0.14-fp16-cuda": _genai("qwen3", GENAI_14, "fp16", "cuda"),
    "qwen3-genai-0.18-fp16-cuda": _genai("qwen3", GENAI_18, "fp16", "cuda", not_on_cpu=_NO_NORMS),
    "llama-genai-0.18-fp16-cuda": _genai("llama", GENAI_18, "fp16", "cuda"),
    "qwen3-genai-0.18-bf16-cuda": _genai("qwen3", GENAI_18, "bf16", "cuda", not_on_cpu=_NO_BF16),
    "qwen3-genai-0.18-fp16-webgpu": _genai("qwen3", GENAI_18, "fp16", "webgpu", not_on_cpu=_NO_NORMS),
    "llama-genai-0.18-fp16-webgpu": _genai("llama", GENAI_18, "fp16", "webgpu"),
    "llama-genai-0.18-kv8": _genai(
        "llama", GENAI_18, "fp32", "cpu", "kv_cache_quant_scheme=int8_per_channel", kv_dtype="int8"
    ),
    "llama-genai-0.18-kv4": _genai(
        "llama", GENAI_18, "fp32", "cpu", "kv_cache_quant_scheme=int4_per_tensor", kv_dtype="int4"
    ),
    "qwen3-genai-0.18-kvfp8-cuda": _genai(
        "qwen3",
        GENAI_18,
        "fp16",
        "cuda",
        "kv_cache_quant_scheme=fp8_per_tensor",
        kv_dtype="fp8",
        not_on_cpu=_NO_FP8,
    ),
    "llama-genai-0.18-int4-cuda": _genai("llama", GENAI_18, "int4", "cuda", kv_dtype="fp16"),
    "llama-genai-0.18-paged-cuda": _genai(
        "llama", GENAI_18, "fp16", "cuda", "use_paged_attention=true", not_on_cpu=_NO_PAGED
    ),
    "llama-genai-0.18-paged-webgpu": _genai(
        "llama", GENAI_18, "fp16", "webgpu", "use_paged_attention=true", not_on_cpu=_NO_PAGED
    ),
    **{f"{family}-mobius": _mobius(family) for family in ("llama", "qwen3", "gemma3_text", "gemma4_text", "gemma4_vl")},
    **{f"{family}-mobius": _mobius(family) for family in ("qwen2_5_vl", "qwen3_5", "qwen3_5_text", "qwen3_next")},
    **{f"{family}-mobius": _mobius(family) for family in ("nemotron_h", "gpt2", "t5", "whisper")},
    "mamba-mobius": _mobius("mamba", one_token=True),
    "jamba-mobius": _mobius("jamba", one_token=True, differs="mobius gives Jamba's attention rotary positions"),
    "llama-mobius-static": _mobius("llama", static_cache=128),
    "llama-mobius-fp16": _mobius("llama", "fp16"),
    "llama-mobius-bf16": _mobius("llama", "bf16", not_on_cpu=_NO_BF16),
    "llama-mobius-fp16-cuda": _mobius("llama", "fp16", provider="cuda"),
    "llama-mobius-fp32-webgpu": _mobius("llama", provider="webgpu"),
    **{f"{family}-optimum": _optimum(family) for family in ("llama", "gpt2", "t5", "marian", "whisper")},
    **{f"{family}-optimum-merged": _optimum(family, merged=True) for family in ("llama", "gpt2")},
    # Positions that are scaled: all of a step alike (longrope), each token by its own place, or by what is before it.
    **{f"phi3_longrope-genai-{number}": _genai("phi3_longrope", full) for number, full in GENAI.items()},
    **{f"{family}-genai-0.18": _genai(family) for family in ("phi3_further", "phi4_mini", "llama_scaled")},
    **{f"{family}-mobius": _mobius(family) for family in ("phi3_longrope", "phi3_further", "phi4_mini")},
    "phi3_longrope-genai-0.18-int4": _genai("phi3_longrope", GENAI_18, "int4"),
    "phi3_longrope-genai-0.18-fp16-cpu": _genai("phi3_longrope", GENAI_18, "fp16"),
    "phi3_longrope-genai-0.18-fp16-dml": _genai("phi3_longrope", GENAI_18, "fp16", "dml"),
    "phi3_longrope-genai-0.18-fp32-webgpu": _genai("phi3_longrope", GENAI_18, "fp32", "webgpu", "use_webgpu_fp32=true"),
    "phi3_longrope-mobius-static": _mobius("phi3_longrope", static_cache=128),
    "phi3_longrope-mobius-webgpu": _mobius("phi3_longrope", provider="webgpu", differs=_TABLES),
    **{f"{family}-genai-0.14": _genai(family, GENAI_14) for family in ("llama_linear", "llama_scaled")},
    **{f"{family}-mobius": _mobius(family) for family in ("llama_linear", "llama_scaled", "llama_yarn", "ministral3")},
    **{f"{family}-mobius": _mobius(family) for family in ("bloom", "mpt")},
    **{f"{family}-optimum": _optimum(family) for family in ("bloom", "mpt")},
    "llama-olive-lengths": _surgery("llama", "AttentionMaskToSequenceLengths"),
}
ALL = list(CATALOG)


def export(name: str) -> Export:
    """The export of that name, made on first use; skips the test where its exporter cannot be had."""
    recipe = CATALOG[name]
    return Export(
        name,
        recipe.make(),
        hf_model(recipe.family),
        recipe.family,
        recipe.exporter,
        recipe.dtype,
        recipe.kv_dtype or ("fp32" if recipe.dtype.startswith("int") else recipe.dtype),
        recipe.not_on_cpu,
        recipe.differs,
        recipe.one_token,
    )
