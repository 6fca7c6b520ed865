"""Which library runs a model: sessions of ONNX Runtime that we drive, or onnxruntime-genai. Imports neither."""

from __future__ import annotations

from typing import Literal

from olive_ext.config import EngineConfig
from olive_ext.errors import ModelError
from olive_ext.model.types import ModelFiles

Runtime = Literal["onnxruntime", "genai"]


def choose_runtime(config: EngineConfig, files: ModelFiles) -> tuple[Runtime, str]:
    """The runtime and which rule chose it."""
    if config.runtime != "auto":
        return config.runtime, "engine.runtime"
    if files.pipeline:
        graphs = ", ".join(files.pipeline)
        return "genai", f"auto: genai_config.json makes the decoder of a pipeline of graphs ({graphs})"
    if window := input_window(files):
        return "genai", f"auto: genai_config.json feeds the decoder windows of {window} tokens"
    return "onnxruntime", "auto: the decoder is one graph that takes inputs of any length"


def input_window(files: ModelFiles) -> int:
    """The fixed number of tokens that a graph of static shape takes; 0 where any will do.

    `slide_inputs` is true where it is not written (onnxruntime-genai's src/config.h).
    """
    window = (files.genai_config.get("model") or {}).get("decoder", {}).get("sliding_window") or {}
    return int(window.get("window_size", 0)) if window.get("slide_inputs", True) else 0


def suggest_genai(refusal: ModelError, files: ModelFiles) -> ModelError:
    """The refusal of a graph by "onnxruntime", with the other runtime where the package is made for it."""
    if not files.genai_config:
        return refusal
    return ModelError(f"{refusal}; onnxruntime-genai may run it, more slowly: 'engine.runtime' = \"genai\"")
