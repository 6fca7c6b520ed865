"""The same fp32 weights twice: as an ONNX package in our engine, and in Evalution's own transformers engine."""

from __future__ import annotations

from functools import cache
from typing import Any

from evalution import Model
from evalution.engines import TransformersCompat
from evalution.engines.base import BaseInferenceSession

from olive_ext.plugins.suites.evalution import OrtEngine, OrtInferenceSession
from tests.exports import genai_export, hf_model

FAMILIES = ("llama", "qwen3", "gemma3_text")


def onnx_model(family: str = "llama", **fields: Any) -> Model:
    return Model(path=str(genai_export(family)), **fields)


def open_ours(family: str = "llama", **settings: Any) -> OrtInferenceSession:
    return OrtEngine(**settings).build(onnx_model(family))


@cache
def theirs(family: str = "llama") -> BaseInferenceSession:
    """One text at a time: in a batch of several it generates up to the largest `max_new_tokens`, and leaves the padding
    behind a text's end in the text."""
    engine = TransformersCompat(dtype="float32", device="cpu", batch_size=1)
    return engine.build(Model(path=str(hf_model(family))))
