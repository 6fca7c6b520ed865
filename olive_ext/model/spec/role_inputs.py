"""What the inputs of a decoder hold besides its caches, computed from the rows of a step: one function for each role.

Knows no session and no cache. Axes: B rows, S tokens of a row where all have as many, N tokens of all rows, W width of
the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.model.types import InputSpec, Role, TensorSpec

Array = npt.NDArray[Any]

DTYPES = {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16, 11: np.float64}
"""numpy's type for the ONNX element types of such inputs (INT32, INT64, BOOL) and features (FLOAT, FLOAT16, DOUBLE)."""


@dataclass(frozen=True)
class StepArrays:
    """The rows of a step as arrays."""

    tokens_N: Array
    lengths_B: Array
    past_B: Array
    total_B: Array
    """Positions, or cells, of each row after the step."""

    positions_N: Array
    width: int
    """Positions, or cells, that a mask covers."""

    rotary_3N: Array | None = None
    """Time, height and width of each token where these differ: in sequences with pictures."""

    pads_in_front: bool = False
    """Whether a row with fewer positions than the mask covers has the last of these, not the first."""

    whole_length: int = 0
    """Positions of the whole texts to which the rows belong, as far as the graph distinguishes lengths."""


def arrays_of(rows: Sequence[tuple[int, ...]]) -> StepArrays:
    """For each row, the positions before it and its number of tokens; and its last tokens, if these are not 0."""
    past_B, lengths_B = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    positions_N = np.concatenate([np.arange(past, past + length) for past, length, *_ in rows])
    tokens_N = np.concatenate([[*[0] * (length - len(last)), *last] for _, length, *last in rows])
    total_B = past_B + lengths_B
    return StepArrays(tokens_N, lengths_B, past_B, total_B, positions_N, int(total_B.max()))


def _positions(rows: StepArrays, tensor: TensorSpec) -> Array:
    if len(tensor.shape) < 3 or rows.rotary_3N is None:
        return _by_rank(rows.positions_N, rows, tensor)
    return rows.rotary_3N.reshape(3, len(rows.past_B), -1)


def _by_rank(values_N: Array, rows: StepArrays, tensor: TensorSpec) -> Array:
    """[N], [B, S] or [3, B, S], as the graph declares."""
    if len(tensor.shape) == 1:
        return values_N
    values_BS = values_N.reshape(len(rows.past_B), -1)
    return values_BS if len(tensor.shape) == 2 else np.stack([values_BS] * 3)


def _mask(rows: StepArrays, _: TensorSpec) -> Array:
    if rows.pads_in_front:
        return np.arange(rows.width) >= rows.width - rows.total_B[:, None]
    return np.arange(rows.width) < rows.total_B[:, None]


UNSPLIT = 512
"""CUDA's PagedAttention splits the keys of rows that decode where the longest row has more positions than this."""


def ceiling(number: int) -> int:
    """The first power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def _bounds(rows: StepArrays, tensor: TensorSpec) -> Array:
    """The most tokens of a row, the most positions, and a lower bound of the longest row. For captured steps they are
    equal for all steps of up to as many positions as a power of two; 0 means unknown."""
    whole = ceiling(int(np.maximum.reduce(rows.total_B)))
    bounds = [np.maximum.reduce(rows.lengths_B), rows.width, whole // 2 + 1 if whole > UNSPLIT else 0]
    return np.array(bounds[: int(tensor.shape[0])])


COMPUTE: Mapping[Role, Callable[[StepArrays, TensorSpec], Array]] = {
    Role.INPUT_IDS: lambda rows, tensor: _by_rank(rows.tokens_N, rows, tensor),
    Role.ATTENTION_MASK: _mask,
    Role.POSITION_IDS: _positions,
    Role.CACHE_POSITION: lambda rows, _: rows.positions_N[: rows.lengths_B[0]],
    Role.LAST_POSITIONS: lambda rows, tensor: (rows.total_B - 1).reshape([-1, 1][: len(tensor.shape)]),
    Role.TOTAL_LENGTH: lambda rows, tensor: np.full([1] * len(tensor.shape), rows.width),
    Role.WRITE_INDICES: lambda rows, _: rows.past_B,
    Role.VALID_LENGTHS: lambda rows, _: rows.total_B,
    Role.CUMULATIVE_LENGTHS: lambda rows, _: np.concatenate([[0], np.cumsum(rows.lengths_B)]),
    Role.PAST_LENGTHS: lambda rows, _: rows.past_B,
    Role.ATTENTION_BOUNDS: _bounds,
    Role.USE_CACHE_BRANCH: lambda rows, _: rows.past_B[:1] > 0,
    Role.WHOLE_LENGTH: lambda rows, _: np.array(rows.whole_length),
}
"""What each role's input holds. Block tables are left to the KV store."""


def input_array(spec: InputSpec, rows: StepArrays) -> Array:
    """What the input holds for these rows, in the type that the graph declares and the shape of the role (`Role`)."""
    return np.ascontiguousarray(COMPUTE[spec.role](rows, spec.tensor), DTYPES[spec.tensor.elem_type])
