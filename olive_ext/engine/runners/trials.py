"""Tries on an opened model what its graph does not tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from olive_ext.engine.step import FloatArray, Row, Runner, Step
from olive_ext.errors import ModelError, RunError

TOLERANCE, MOST = 0.02, 0.3
"""Difference that passes, as a part of what another context makes for a difference: rounding is far below, a token that
sees wrong positions is far above. Where activations are rounded to few bits, three times the difference that feeding
the same tokens one by one makes, up to `MOST`."""


def fitting_chunk_size(chunk_size: int, runner: Runner, notes: list[str]) -> int:
    """`chunk_size`, or 1 and a note where the graph fails on several tokens behind resident positions.

    onnxruntime-genai's exports with MultiHeadAttention make their mask for a whole prompt or for one token only, and
    Mamba graphs that declare any number run with one.
    Raises `ModelError` where the model cannot run a token at all.
    """
    runner.reserve(3)
    try:
        runner.run(Step((Row(0, 0, (0,)),)))
    except RunError as error:
        raise ModelError(f"the model cannot run one token: {error}") from error
    if chunk_size == 1:
        return 1
    try:
        runner.run(Step((Row(0, 1, (0, 0)),)))
    except RunError as error:
        notes.append(f"steps are cut to 1 token, which is slow, because the graph takes no more behind a past: {error}")
        return 1
    return chunk_size


def disagreement(expected: Sequence[FloatArray], found: Sequence[FloatArray], again: FloatArray) -> str | None:
    """How far `found` is from `expected`, two contexts' log-probabilities; None where that is rounding. `again` is the
    second context's, fed one token a step."""
    difference = max(float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))
    spread = float(np.abs(expected[0] - expected[1]).max())
    rounding = float(np.abs(expected[1] - again).max())
    if difference <= max(TOLERANCE * spread, min(3 * rounding, MOST * spread)):
        return None
    return f"{difference:.2g} nats off, where another context makes {spread:.2g}"
