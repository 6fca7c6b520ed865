"""Tries on an opened model what its graph does not tell."""

from __future__ import annotations

from olive_ext.engine.step import Row, Runner, Step
from olive_ext.errors import ModelError, RunError


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
