"""Which library runs a model: ONNX Runtime sessions of our own, or onnxruntime-genai. Knows neither."""

from __future__ import annotations

from typing import Literal

from olive_ext.config import EngineConfig
from olive_ext.model.types import ModelFiles

Runtime = Literal["onnxruntime", "genai"]


def choose_runtime(config: EngineConfig, files: ModelFiles) -> tuple[Runtime, str]:
    """The runtime and which rule chose it."""
    if config.runtime != "auto":
        return config.runtime, "engine.runtime"
    reason = _only_genai(files)
    if reason:
        return "genai", f"auto: {reason}"
    return "onnxruntime", "auto: one decoder graph"


def _only_genai(files: ModelFiles) -> str:
    """Why no single session can run the decoder; empty where one can."""
    stages = files.pipeline
    if files.decoder in stages.values():
        return f"genai_config.json splits the decoder into a pipeline of {len(stages)} graphs ({', '.join(stages)})"
    window = files.decoder_config.get("sliding_window") or {}
    if window.get("slide_inputs", bool(window)):
        return f"genai_config.json feeds the decoder windows of {window.get('window_size')} tokens (slide_inputs)"
    return ""
