"""Picks the scored rows out of a value that holds all positions.

Axes: B batch, S positions, R rows that are scored.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from olive_ext.graph.edit import NodeWriter


class RowPicker:
    """Adds the input `score_rows`[R], int64, indices into the flattened B*S.

    With R = 0, which with `has_rows` never comes, it picks row 0, because reductions over no rows return the wrong
    shape on CPU, and fail elsewhere.
    """

    def __init__(self, writer: NodeWriter, *, has_rows: bool) -> None:
        self._writer = writer
        self._rows = writer.input("score_rows", onnx.TensorProto.INT64, ["R"])
        if has_rows:
            return
        padded = writer.add("Concat", [self._rows, writer.integers([0])], axis=0)
        candidates = writer.add("Concat", [writer.add("Shape", [self._rows]), writer.integers([1])], axis=0)
        count = writer.reduce("ReduceMax", candidates, keepdims=1)
        self._rows = writer.add("Slice", [padded, writer.integers([0]), count])

    def pick(self, value: str, size: int | None, *, is_flat: bool) -> str:
        """The rows of `value` [.., size]: [R, size] where flat, else [1, R, size], for operators to keep their rank."""
        lead = [-1] if is_flat else [1, -1]
        merged = self._writer.add("Reshape", [value, shape_with(self._writer, lead, value, size)])
        return self._writer.add("Gather", [merged, self._rows], axis=len(lead) - 1)


def shape_with(writer: NodeWriter, lead: Sequence[int], value: str, size: int | None) -> str:
    """The shape [*lead, size of the last axis of `value`], computed at run time where `size` is not known."""
    if size is not None:
        return writer.integers([*lead, size])
    last = writer.add("Gather", [writer.add("Shape", [value]), writer.integers([-1])], axis=0)
    return writer.add("Concat", [writer.integers(lead), last], axis=0)
