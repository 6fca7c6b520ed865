"""Tries the attention of a WebGPU device before numbers are taken from it.

The provider attends to 32 tokens and more with a shader of its own, which exchanges keys between the lanes of a
subgroup. On Mesa's software Vulkan all keys but the first few come out wrong, without an error (onnxruntime-ep-webgpu
0.4.0, Mesa 25). Shorter steps take another shader, which is right there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from olive_ext.engine.runners.ort.kv.base import Device
from olive_ext.engine.step import FloatArray
from olive_ext.graph.standalone_graphs import INPUTS, OUTPUT, attention_graph
from olive_ext.model.decisions import SHORT_STEP, is_attention_at_risk
from olive_ext.model.types import DecoderSpec

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Of attended values around 1: the wrong shader is off by 0.1 and more."""

NUM_HEADS = 1
HEAD_SIZE = 16
"""Small, because a software device compiles the shader of size 64 for minutes. The fault shows at every size."""

OpenGraph = Callable[[bytes], Any]
FLOAT = 1
"""ONNX's element type."""


def fitting_attention(
    chunk_size: int, device: Device, spec: DecoderSpec, open_graph: OpenGraph
) -> tuple[int, list[str]]:
    """The most tokens of a step on this device, and a note where that is less than `chunk_size`."""
    if not is_attention_at_risk(chunk_size, device, spec) or attends_to_long_steps(open_graph):
        return chunk_size, []
    note = f"steps are cut to {SHORT_STEP} tokens: this {device.kind} device attends to longer ones wrongly"
    logger.warning("%s", note)
    return SHORT_STEP, [note]


def attends_to_long_steps(open_graph: OpenGraph) -> bool:
    """Whether the first tokens of a long step see what they see in a short one, as causal attention must."""
    session = open_graph(attention_graph(FLOAT, NUM_HEADS, HEAD_SIZE))
    tokens = np.random.default_rng(0).standard_normal((3, 1, 2 * SHORT_STEP, NUM_HEADS * HEAD_SIZE), np.float32)
    long = _attend(session, tokens)
    short = _attend(session, tokens[:, :, :SHORT_STEP])
    return bool(np.abs(long[:, :SHORT_STEP] - short).max() < TOLERANCE)


def _attend(session: Any, tokens: FloatArray) -> FloatArray:
    length = tokens.shape[2]
    past = np.zeros((1, NUM_HEADS, 0, HEAD_SIZE), np.float32)
    arrays = (*tokens, past, past, np.array([length - 1], np.int32), np.array(length, np.int32))
    binding = session.io_binding()
    for name, array in zip(INPUTS, arrays, strict=True):
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    binding.bind_output(OUTPUT)
    session.run_with_iobinding(binding)
    (attended,) = binding.get_outputs()
    result: FloatArray = attended.numpy()
    return result
