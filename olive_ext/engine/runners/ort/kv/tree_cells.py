"""The KV cache of the trunk on the device, and the bias that tells attention which cells a token sees.

Axes: B rows, S tokens of a row, T cells or positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.runners.ort.feed import Feed
from olive_ext.engine.runners.ort.kv.in_place import ViewKv
from olive_ext.engine.step import Row, Step, visible_cells
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

    def bind(self, step: Step) -> ort.IOBinding:
        return self.kv.bind_slots(0, 1)


def visible_positions(rows: Sequence[Row], window: int | None) -> Array:
    """[1 or B, 1, S, T]: all positions, or those within the window."""
    num_tokens = len(rows[0].tokens)
    past_B = np.array([row.past for row in rows])
    num_positions = int(past_B.max()) + num_tokens
    if window is None:
        return np.ones((1, 1, num_tokens, num_positions), np.bool_)
    distance_BST = past_B[:, None, None] + np.arange(num_tokens)[:, None] - np.arange(num_positions)
    return (distance_BST < window)[:, None]
