"""The KV cache of the trunk on the device, and the bias that tells attention which cells a token sees.

Axes: B rows, S tokens of a row, T cells or positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.runners.ort.feed import Feed
from olive_ext.engine.runners.ort.kv.in_place import ViewKv
from olive_ext.engine.scheduling.shared_prefix import FIRST_CELL
from olive_ext.engine.step import Row, Step
from olive_ext.graph.tree_attention import BiasInput

Array = npt.NDArray[Any]

DTYPES: Mapping[int, tuple[type[np.floating[Any]], float]] = {1: (np.float32, -1e30), 10: (np.float16, -6e4)}
"""By ONNX type (FLOAT 1, FLOAT16 10): numpy's type, and what is added to a score to hide a cell. Finite, because a
block of cells that are all hidden must not make NaN."""


@dataclass(frozen=True)
class Bias:
    """Fills the graph's bias inputs. Attention itself hides what comes after a token."""

    inputs: Sequence[BiasInput]

    def bind(self, binding: ort.IOBinding, feed: Feed, step: Step) -> None:
        for found in self.inputs:
            dtype, hidden = DTYPES[found.elem_type]
            if step.first_cell is not None:
                visible = visible_cells(step.rows, step.first_cell, found.window)
            else:
                visible = visible_positions(step.rows, found.window)
            feed.bind(binding, found.name, np.where(visible, dtype(0), dtype(hidden)))


@dataclass
class SharedPrefixKv:
    """One slot of cells. `is_used` is False where branches would be wrong or slower."""

    kv: ViewKv
    bias: Bias
    is_used: bool = field(default=True)

    def bind(self, step: Step) -> ort.IOBinding:
        return self.kv.bind_slots(0, 1)


def visible_cells(rows: Sequence[Row], first_cell: int, window: int | None) -> Array:
    """[1, 1, S, T]: each branch sees its own cells and those of its past, within the window."""
    num_tokens = sum(len(row.tokens) for row in rows)
    visible_ST = np.zeros((num_tokens, first_cell + num_tokens), np.bool_)
    positions_T = np.arange(first_cell + num_tokens) - FIRST_CELL
    start = 0
    for row in rows:
        stop = start + len(row.tokens)
        assert row.cells_P is not None
        visible_ST[start:stop, row.cells_P] = True
        visible_ST[start:stop, first_cell + start : first_cell + stop] = True
        positions_T[first_cell + start : first_cell + stop] = row.past + np.arange(stop - start)
        start = stop
    if window is not None:
        visible_ST &= positions_T[first_cell:, None] - positions_T < window
    return visible_ST[None, None]


def visible_positions(rows: Sequence[Row], window: int | None) -> Array:
    """[1 or B, 1, S, T]: all positions, or those within the window."""
    num_tokens = len(rows[0].tokens)
    past_B = np.array([row.past for row in rows])
    num_positions = int(past_B.max()) + num_tokens
    if window is None:
        return np.ones((1, 1, num_tokens, num_positions), np.bool_)
    distance_BST = past_B[:, None, None] + np.arange(num_tokens)[:, None] - np.arange(num_positions)
    return (distance_BST < window)[:, None]
