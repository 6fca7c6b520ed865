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
from tests.exports.plain import hf_logits, plain_logits

pytestmark = pytest.mark.exporters

# More than the windows of 16 hold.
TOKENS = [2, 40, 300, 77, 5, 900, 41, 41, 512, 213, 600, 7, 8, 99, 100, 350, 23, 24, 650, 211, 212]

# Largest difference of a logit (they reach 6 to 10) that rounding explains. Random weights say nothing about what 4 or
# 8 bits do to a real model: of quantized exports only finite numbers are asked.
TOLERANCE = {"fp32": 3e-4, "fp16": 0.05, "bf16": 0.5}

_references: dict[Path, np.ndarray] = {}


def _reference(made: Export) -> np.ndarray:
    """Of the same source once."""
    if made.hf not in _references:
        _references[made.hf] = hf_logits(made, TOKENS)
    return _references[made.hf]


@pytest.mark.parametrize("name", ALL)
def test_export_computes_what_its_source_computes(name: str) -> None:
    made = export(name)
    if made.not_on_cpu:
        _check_that_the_cpu_refuses(made)
        return
    logits = plain_logits(made, TOKENS)
    assert np.isfinite(logits).all()
    if made.dtype not in TOLERANCE or made.kv_dtype not in TOLERANCE:
        return
    equal = np.abs(logits - _reference(made)[-len(logits) :]).max() < TOLERANCE[made.dtype]
    assert equal == (not made.differs)


def _check_that_the_cpu_refuses(made: Export) -> None:
    """The reason given still holds, and the file is a graph all the same."""
    assert onnx.load(made.path / "model.onnx", load_external_data=False).graph.node
    refusals = onnxruntime.capi.onnxruntime_pybind11_state
    with pytest.raises((refusals.NotImplemented, refusals.InvalidArgument, refusals.InvalidGraph)):
        plain_logits(made, TOKENS)
