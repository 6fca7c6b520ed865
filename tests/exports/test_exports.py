"""Every export exists and computes what the Hugging Face model computes, in a plain session without this project.

So what later fails on one of them is not the export.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.exports import ALL, Export, export
from tests.exports.catalog import CATALOG
from tests.exports.plain import hf_logits, plain_logits
from tests.exports.ropes import FIRST_MAXIMUM, ROPES

pytestmark = pytest.mark.exporters

# More than the windows of 16 hold.
TOKENS = [2, 40, 300, 77, 5, 900, 41, 41, 512, 213, 600, 7, 8, 99, 100, 350, 23, 24, 650, 211, 212]
# More than the first maximum of positions that are scaled (ropes.ORIGINAL, FURTHER).
FURTHER = [4 + 37 * at % 990 for at in range(310)]

# Largest difference of a logit (they reach 6 to 10) that rounding explains. Random weights say nothing about what 4 or
# 8 bits do to a real model: of quantized exports only finite numbers are asked.
TOLERANCE = {"fp32": 3e-4, "fp16": 0.1, "bf16": 0.5}

_references: dict[tuple[Path, int], np.ndarray] = {}


def _reference(made: Export, tokens: list[int]) -> np.ndarray:
    """Of the same source once."""
    key = made.hf, len(tokens)
    if key not in _references:
        _references[key] = hf_logits(made, tokens)
    return _references[key]


@pytest.mark.parametrize("name", ALL)
def test_export_computes_what_its_source_computes(name: str) -> None:
    made = export(name)
    if made.not_on_cpu:
        _check_that_the_cpu_refuses(made)
        return
    tokens = _tokens(name)
    logits = plain_logits(made, tokens)
    assert np.isfinite(logits).all()
    if made.dtype not in TOLERANCE or made.kv_dtype not in TOLERANCE:
        return
    equal = np.abs(logits - _reference(made, tokens)[-len(logits) :]).max() < TOLERANCE[made.dtype]
    assert equal == (not made.differs)


def _tokens(name: str) -> list[int]:
    """Behind every length that decides; a static cache of the suite has 128 places."""
    if CATALOG[name].family not in ROPES:
        return TOKENS
    return FURTHER[:70] if name.endswith("-static") else FURTHER


@pytest.mark.parametrize("family", ["phi3_longrope", "phi3_further", "phi4_mini"])
@pytest.mark.parametrize("exporter", ["genai-0.18", "mobius"])
def test_long_factors_begin_with_the_token_behind_the_first_maximum(family: str, exporter: str) -> None:
    """In transformers and in both exports: with as many tokens fed as the first maximum says, the short ones hold."""
    made = export(f"{family}-{exporter}")
    last = FIRST_MAXIMUM[family]
    for count in (last - 1, last, last + 1, last + 2):
        found, wanted = plain_logits(made, FURTHER[:count]), hf_logits(made, FURTHER[:count])
        assert np.abs(found - wanted).max() < TOLERANCE["fp32"]
        if count == last + 1:
            assert np.abs(found[:last] - plain_logits(made, FURTHER[:last])).max() > 0.1


def _check_that_the_cpu_refuses(made: Export) -> None:
    """The reason given still holds, and the file is a graph all the same."""
    assert onnx.load(made.path / "model.onnx", load_external_data=False).graph.node
    refusals = onnxruntime.capi.onnxruntime_pybind11_state
    with pytest.raises((refusals.NotImplemented, refusals.InvalidArgument, refusals.InvalidGraph)):
        plain_logits(made, TOKENS)
