"""Sums over the vocabulary that keep their precision on every device. Knows no logits.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import math

from olive_ext.graph.edit import NodeWriter


def sum_of_rows(writer: NodeWriter, values_RV: str, vocab_size: int | None) -> str:
    """The sum over V, [R, 1], in two stages of about sqrt(V) elements where V is known and has such a divisor: that
    keeps the error of sums of exponentials near 1e-6."""
    block = 1 if vocab_size is None else largest_block(vocab_size)
    if vocab_size is not None and block > 1:
        blocks = writer.add("Reshape", [values_RV, writer.integers([-1, vocab_size // block, block])])
        values_RV = writer.reduce("ReduceSum", blocks)
    return writer.reduce("ReduceSum", values_RV, keepdims=1)


def largest_block(size: int) -> int:
    """The largest divisor up to the square root."""
    return next(block for block in range(math.isqrt(size), 0, -1) if size % block == 0)
