"""The inputs that a decoder takes beside its cache, computed from the rows of a step. One function for each role.

Axes: B rows, S tokens of a row where all have as many, N tokens of all rows, W width of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.step import Row
from olive_ext.model.types import InputSpec, Role, TensorSpec

Array = npt.NDArray[Any]

DTYPES = {6: np.int32, 7: np.int64, 9: np.bool_}
"""numpy's type for the ONNX element types that such inputs have (INT32, INT64, BOOL)."""


@dataclass(frozen=True)
class Layout:
    """A step's rows as arrays. TreeBatches of the trunk are one row to the graph."""

    tokens_N: Array
    lengths_B: Array
    past_B: Array
    positions_N: Array
    width: int
    """Positions, or cells, that a mask speaks of."""

    @classmethod
    def of(cls, rows: Sequence[Row], first_cell: int | None = None, width: int | None = None) -> Layout:
        """The layout of a step's rows; they are branches where there is a `first_cell`. Without a `width` a mask ends
        with the longest row."""
        tokens_N = np.array([token for row in rows for token in row.tokens], np.int64)
        lengths = np.array([len(row.tokens) for row in rows], np.int64)
        past = np.array([row.past for row in rows], np.int64)
        starts = np.cumsum(lengths) - lengths
        positions_N = np.repeat(past - starts, lengths) + np.arange(len(tokens_N))
        if first_cell is not None:
            lengths, past = np.array([len(tokens_N)]), np.array([first_cell])
        return cls(tokens_N, lengths, past, positions_N, width or int((past + lengths).max()))

    @property
    def total_B(self) -> Array:
        """Positions, or cells, of each row after the step."""
        return self.past_B + self.lengths_B

    @property
    def starts_B1(self) -> Array:
        """Where each row's tokens begin among all, and where the last one's end; [B + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths_B)])


def _by_rank(values_N: Array, rows: Layout, tensor: TensorSpec) -> Array:
    """[N], [B, S] or [3, B, S], as the graph declares."""
    if len(tensor.shape) == 1:
        return values_N
    values_BS = values_N.reshape(len(rows.past_B), -1)
    return values_BS if len(tensor.shape) == 2 else np.stack([values_BS] * 3)


def _mask(rows: Layout, _: TensorSpec) -> Array:
    return np.arange(rows.width) < rows.total_B[:, None]


def _last_positions(rows: Layout, tensor: TensorSpec) -> Array:
    return (rows.total_B - 1).reshape([-1, 1] if len(tensor.shape) == 2 else [-1])


def _total_length(rows: Layout, tensor: TensorSpec) -> Array:
    return np.full([1] * len(tensor.shape), rows.width)


def _bounds(rows: Layout, tensor: TensorSpec) -> Array:
    bounds = [rows.lengths_B.max(), rows.total_B.max(), rows.total_B.max()]
    return np.array(bounds[: int(tensor.shape[0])])


COMPUTE: Mapping[Role, Callable[[Layout, TensorSpec], Array]] = {
    Role.INPUT_IDS: lambda rows, tensor: _by_rank(rows.tokens_N, rows, tensor),
    Role.ATTENTION_MASK: _mask,
    Role.POSITION_IDS: lambda rows, tensor: _by_rank(rows.positions_N, rows, tensor),
    Role.CACHE_POSITION: lambda rows, _: rows.positions_N,
    Role.LAST_POSITIONS: _last_positions,
    Role.TOTAL_LENGTH: _total_length,
    Role.WRITE_INDICES: lambda rows, _: rows.past_B,
    Role.VALID_LENGTHS: lambda rows, _: rows.total_B,
    Role.CUMULATIVE_LENGTHS: lambda rows, _: rows.starts_B1,
    Role.PAST_LENGTHS: lambda rows, _: rows.past_B,
    Role.ATTENTION_BOUNDS: _bounds,
    Role.USE_CACHE_BRANCH: lambda rows, _: rows.past_B[:1] > 0,
}
"""What each role's input holds. A block table is not here: the KV store knows it."""


def compute_inputs(specs: Sequence[InputSpec], layout: Layout) -> dict[str, Array]:
    """Arrays by input name, in the types that the graph declares."""
    return {
        spec.tensor.name: np.ascontiguousarray(COMPUTE[spec.role](layout, spec.tensor), DTYPES[spec.tensor.elem_type])
        for spec in specs
        if spec.role in COMPUTE
    }
