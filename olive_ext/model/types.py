"""What is on disk and on this machine, resolved and frozen: no "auto" left, and where each value came from.

Knows no Olive, no lm-eval and no session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelFiles:
    """Where the parts of one model lie. `origins` says for each field by which rule it was found."""

    decoder: Path
    """The .onnx file that holds the decoder and returns logits."""

    directory: Path
    """The package's root: the folder with genai_config.json, else the decoder's own."""

    genai_config: Mapping[str, Any]
    """The parsed genai_config.json; empty where there is none."""

    hf_config: Mapping[str, Any]
    """The parsed config.json beside the decoder or in the package's root; empty where there is none."""

    tokenizer: str
    """Folder (or hub name) that transformers' AutoTokenizer loads."""

    origins: Mapping[str, str] = field(default_factory=dict)

    weights: tuple[Path, ...] = ()
    """The decoder's external-data files, as named, in order of their locations in the graph; all exist."""


@dataclass(frozen=True)
class Provider:
    """One execution provider to run on, in order of preference."""

    name: str
    """ONNX Runtime's name, e.g. "CUDAExecutionProvider"."""

    device: str
    """Device type of its memory as ONNX Runtime spells it for IOBinding: "cpu", "cuda", "dml", "webgpu", ..."""

    options: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    """Which setting asked for it."""


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output: name, ONNX element type (`onnx.TensorProto.DataType`), shape with symbolic names."""

    name: str
    elem_type: int
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class KvTensor:
    """One key or value cache: input `past`, output `present`, shape [B, heads, T, head_size]."""

    past: str
    present: str
    elem_type: int
    heads: int
    head_size: int


@dataclass(frozen=True)
class DecoderSpec:
    """What a decoder takes, returns and can do, read from its graph and genai_config.json."""

    input_ids: TensorSpec
    attention_mask: TensorSpec | None
    position_ids: TensorSpec | None
    kv: tuple[KvTensor, ...]
    logits: TensorSpec
    vocab_size: int
    context_length: int
    is_kv_in_place: bool
    """True where past and present may be one buffer (every KV pair belongs to one GroupQueryAttention)."""

    notes: tuple[str, ...] = ()
    """How what is not obvious was decided, one sentence each, for `olive-ext check`."""
