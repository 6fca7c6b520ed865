"""Every decoder family, as real exporters write it, gives the reference's numbers, for any slots and chunks.

What is compared is in docs/decoders.py, which also makes the table in docs/decoders.md. The full list builds with
exporters that are fetched from the package index and takes half an hour: `python -m pytest -m exporters`.
"""

from __future__ import annotations

from typing import Any

import pytest

from docs.decoders import INTEGERS, measure
from tests.exports import ALL, export
from tests.exports.ropes import FIRST_MAXIMUM

COMMON = [
    "gemma3_text-genai-0.18",  # windowed cache
    "lfm2-genai-0.18",  # convolution states
    "llama-genai-0.18-int4-qdq",  # activations that ONNX Runtime's fusion rounds
    "llama-genai-0.18-kv8",  # quantized cache
    "llama-olive-lengths",  # lengths in place of a mask
    "whisper-genai-0.18",  # an encoder's states
]
"""What the ordinary run, and `long`, cover beside tests/agreement: families whose exporter is at hand or small."""

REFUSED = {
    "llama-genai-0.18-pruned": "pruned LM head",
    "llama-genai-0.18-embeds": "no genai_config.json names the graph",
    "qwen2_5_vl-genai-0.14": "no genai_config.json names the graph",
    "qwen3_5-genai-0.14": "no genai_config.json names the graph",
}
"""Exports that cannot be scored, and a part of the reason that is told."""

NATS = {"fp32": 1e-4, "int4": 1e-4, "int8": 1e-4, "fp16": 5e-2, "bf16": 5e-1}
"""Bounds by the type that is computed in. Quantized weights are compared with the same graph run plainly; ONNX Runtime
computes half precision on the CPU in fp32 and drops round trips, differently in an edited graph."""

ENCODER_DECODERS = {"whisper", "t5", "marian"}
ALONE = {*ENCODER_DECODERS, "mamba", "jamba"}
"""Prompts of other lengths share no step there."""

ALONE_IN_HALF = ("llama-genai-0.18-fp16-cpu", "phi3_longrope-genai-0.18-fp16-cpu")
"""Casts stand between their caches and their attention: rows behind different pasts fail the trial at opening."""

BY_THE_PAST = ("bloom-mobius", "mpt-mobius")
"""Their biases are counted from the shape of the past: rows behind different pasts would have each other's."""

LEAST_ROWS = 3
"""A step of 6 prompts, their own steps counted, has more; where short and long ones share none, one fewer."""

ROUNDED_FORK = 1.1
"""Tokens fed over distinct ones where activations are rounded: every step is filled up to an even number of tokens."""

ROUNDING = {"gemma4_unified": 5e-5}
"""transformers in fp32 are 2.5e-5 nats from transformers in fp64 there."""

LINEAR_ATTENTION = {"qwen3_5", "qwen3_5_text", "qwen3_next"}
LINEAR_ATTENTION_NATS = 5e-4
"""Their recurrence adds up rounding: in fp32, transformers and the untouched graph differ by as much as we do from
transformers (and both from transformers in fp64)."""


ON_DEVICE = {"lfm2-genai-0.18": 1e-4, "llama-genai-0.18-paged-webgpu": 0.1}
"""Bounds on WebGPU of families whose kernels it has: states that are kept at forks, and blocks that a table assigns,
in fp16. More rows are in docs/decoders.md (`python -m docs.decoders --provider webgpu`)."""


IN_AGREEMENT = ("gemma3_text-genai-0.18", "llama-genai-0.18-kv8", "whisper-genai-0.18")
"""Those of which the table of agreement compares scores and answers in every run; the others are there at times."""


def _mark(name: str) -> Any:
    if name not in COMMON:
        return pytest.mark.exporters
    return [pytest.mark.long] if name in IN_AGREEMENT else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=_mark(name)) for name in ALL])
def test_family_agrees_with_its_reference(name: str) -> None:
    row = measure(name, "cpu")
    if name in REFUSED:
        assert REFUSED[name] in row["refused"]
        return
    if export(name).not_on_cpu:
        assert row["refused"].startswith("ONNX Runtime")
        return
    assert "refused" not in row, row
    bound = max(NATS[row["dtype"]], NATS[row["kv"]] if row["kv"] in ("fp16", "bf16") else 0)
    assert float(row["plain"]) < bound
    assert float(row["score"]) < (LINEAR_ATTENTION_NATS if row["family"] in LINEAR_ATTENTION else bound)
    assert (row["roll"] == "") == (row["family"] in ENCODER_DECODERS)
    assert float(row["roll"] or 0) < bound
    assert float(row["fork"]) <= (ROUNDED_FORK if row["dtype"] in INTEGERS else 1)
    assert float(row["batch"]) < (ROUNDING.get(row["family"], 1e-5) if bound < 1e-3 else bound)
    least = LEAST_ROWS - (row["family"] in FIRST_MAXIMUM)
    assert float(row["rows"]) > least or row["family"] in ALONE or name in (*ALONE_IN_HALF, *BY_THE_PAST)
    equal, total = map(int, row["generate"].split(" of "))
    assert equal == total or bound > 1e-3


@pytest.mark.webgpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_family_agrees_with_transformers_on_the_device(name: str) -> None:
    row = measure(name, "webgpu")
    assert "refused" not in row, row
    assert float(row["score"]) < ON_DEVICE[name]
    assert float(row["batch"]) < ON_DEVICE[name]
    assert row["fork"] == "1.00"
