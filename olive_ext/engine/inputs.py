"""The inputs that a decoder takes beside its cache, computed from the rows of a step. One function for each role.

Axes: B rows, S tokens of a row, W width of the mask.
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
class Rows:
    """A step's rows as arrays."""

    tokens_BS: Array
    past_B: Array

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_BS.shape[1])

    @property
    def total_B(self) -> Array:
        """Positions of each row after the step."""
        return self.past_B + self.num_tokens

    @property
    def positions_BS(self) -> Array:
        return self.past_B[:, None] + np.arange(self.num_tokens)


def _mask(rows: Rows, _: TensorSpec) -> Array:
    return np.arange(rows.total_B.max()) < rows.total_B[:, None]


def _positions(rows: Rows, tensor: TensorSpec) -> Array:
    return rows.positions_BS if len(tensor.shape) == 2 else np.stack([rows.positions_BS] * 3)


def _last_positions(rows: Rows, tensor: TensorSpec) -> Array:
    return (rows.total_B - 1).reshape([-1, 1] if len(tensor.shape) == 2 else [-1])


def _total_length(rows: Rows, tensor: TensorSpec) -> Array:
    return np.full([1] * len(tensor.shape), rows.total_B.max())


COMPUTE: Mapping[Role, Callable[[Rows, TensorSpec], Array]] = {
    Role.INPUT_IDS: lambda rows, _: rows.tokens_BS,
    Role.ATTENTION_MASK: _mask,
    Role.POSITION_IDS: _positions,
    Role.CACHE_POSITION: lambda rows, _: rows.positions_BS[0],
    Role.LAST_POSITIONS: _last_positions,
    Role.TOTAL_LENGTH: _total_length,
    Role.WRITE_INDICES: lambda rows, _: rows.past_B,
    Role.VALID_LENGTHS: lambda rows, _: rows.total_B,
    Role.USE_CACHE_BRANCH: lambda rows, _: rows.past_B[:1] > 0,
}


def compute_inputs(specs: Sequence[InputSpec], rows: Sequence[Row]) -> dict[str, Array]:
    """Arrays by input name, in the types that the graph declares."""
    arrays = Rows(np.array([row.tokens for row in rows], np.int64), np.array([row.past for row in rows], np.int64))
    return {
        spec.tensor.name: np.ascontiguousarray(COMPUTE[spec.role](arrays, spec.tensor), DTYPES[spec.tensor.elem_type])
        for spec in specs
    }
