"""Quantized weights as nodes store them: numbers of few bits, in blocks with one scale and zero point each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from olive_ext.graph.nodes import attribute

Array: TypeAlias = npt.NDArray[Any]

_FITS, _LEAST_FOLDED = 20, 1e-3
"""Rounds of alternating least squares, and the least factor of a row or column that was not just lost."""

_ROTATED = 0.3
"""Share of the numbers of the median product beyond a step: AWQ at 4 bits has 0.14, a rotation 0.4 to 0.8."""

_SAMPLED, _ALIKE = 256, 0.01
"""The rows whose ratios to the reference's are compared, and how far these may be apart."""

_PART, _MOST_PARTS = 32, 32
"""The rows of a part, and the parts that columns are fitted by: of 8 bits 1,024 rows leave errors of 0.03 steps."""

_LEAST_SPREAD, _MOST_LEFT = 0.05, 0.3
"""The standard deviation from which on logarithms of factors are not all alike (rounding to 3 bits leaves 0.02 of 128
numbers), and the share of it that one side may leave of the other's: AWQ at 3 bits leaves 0.07 to 0.15, a norm that was
divided twice 1."""

_PART, _MOST_PARTS = 32, 32
"""The rows of a part, and the parts that columns are fitted by: of 8 bits 1,024 rows leave errors of 0.03 steps."""

_LEAST_SPREAD, _LEAST_CORRELATION = 0.05, 0.9
"""The standard deviation from which on logarithms of factors are not all alike (rounding to 3 bits leaves 0.02 of 128
numbers), and their correlation where one side takes back the other: 0.98 of AWQ at 3 bits, by chance 0.45 of 32."""


class Grid(NamedTuple):
    """A quantized weight of N rows of K numbers, in blocks with one scale each."""

    stored: Array
    """[N, K], or bytes along K whose numbers have `bits` bits, the first in the lowest ones."""

    scales: Array
    """[N, blocks]."""

    zeros: Array | int
    """Zero points, in the form of `scales` or packed as `stored`, or a single one for all blocks."""

    num_inputs: int
    block: int
    bits: int = 0
    """The bits of a number that shares a byte with others; 0 where none do."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return len(self.stored), self.num_inputs

    def rows(self, first: int, last: int) -> tuple[Array, Array]:
        """Some rows as the kernel decodes them [R, K], and the steps of their blocks [R, blocks]."""
        num_blocks, points = self.scales.shape[1], self.zeros
        stored = self.stored[first:last]
        if isinstance(points, np.ndarray):
            points = points[first:last]
            points = unpacked(points, self.bits) if self.bits and points.dtype == np.uint8 else points
            points = points.astype(np.float32)[:, :num_blocks, None]
        stored = unpacked(stored, self.bits) if self.bits else stored
        numbers = stored.astype(np.float32)[:, : num_blocks * self.block]
        steps = self.scales[first:last].astype(np.float32)
        numbers = np.pad(numbers, ((0, 0), (0, num_blocks * self.block - numbers.shape[1])))
        numbers = (numbers.reshape(len(steps), num_blocks, self.block) - points) * steps[..., None]
        return numbers.reshape(len(steps), -1)[:, : self.num_inputs], np.abs(steps)


Pair: TypeAlias = tuple[Array, Grid, int]
"""A float weight, the quantized one that holds it, and the row where it begins in that."""


def packed_grid(
    node: onnx.NodeProto, stored: Array, scales: Array, zeros: Array | None, groups: Array | None = None
) -> Grid:
    """As MatMulNBits, GatherBlockQuantized and QMoE (its experts' rows one after the other) store it. Without zero
    points, that of bytes is the middle of the grid, and that of integers of 4 bits is 0. `groups`: the block of each of
    K numbers, where they are not in order."""
    bits = int(attribute(node, "expert_weight_bits" if node.op_type == "QMoE" else "bits", 4))
    bits = bits if stored.dtype == np.uint8 else 0
    num_rows = len(stored) * (stored.shape[1] if node.op_type == "QMoE" else 1)
    stored, scales = stored.reshape(num_rows, -1), scales.reshape(num_rows, -1)
    num_inputs = int(attribute(node, "K", stored.shape[1] * (8 // bits if bits else 1)))
    points = zeros.reshape(num_rows, -1) if zeros is not None else 2 ** (bits - 1) if bits else 0
    block = int(attribute(node, "block_size", 0)) or -(-num_inputs // scales.shape[1])
    if groups is not None:
        if isinstance(points, np.ndarray):
            points = (unpacked(points, bits).astype(np.float32) if points.dtype == np.uint8 else points)[:, groups]
        return Grid(stored, scales[:, groups], points, num_inputs, 1, bits)
    return Grid(stored, scales, points, num_inputs, block, bits)


def dequantized_grid(
    node: onnx.NodeProto, stored: Array, scales: Array, zeros: Array | None, *, is_turned: bool
) -> Grid | None:
    """As DequantizeLinear makes it of a matrix: with one scale for all, for each output, for each input (as with a
    wrong axis of a square matrix) or for blocks of inputs; None for other forms."""
    axis, outputs = attribute(node, "axis", 1) % 2, int(is_turned)
    if stored.ndim != 2 or (scales.ndim == 2 and axis == outputs):
        return None
    parts = [scales, *([] if zeros is None else [zeros])]
    if scales.ndim < 2:
        parts = [part.reshape((1, -1) if axis else (-1, 1)) for part in parts]
    stored, *parts = (part.T if is_turned else part for part in (stored, *parts))
    num_rows, num_inputs = stored.shape
    parts = [np.broadcast_to(part, (num_rows, part.shape[1])) for part in parts]
    block = int(attribute(node, "block_size", 0)) or num_inputs // parts[0].shape[1]
    return Grid(stored, parts[0], parts[1] if zeros is not None else 0, num_inputs, block)


def unpacked(bytes_: Array, bits: int) -> Array:
    """Numbers of `bits` bits as bytes, along the last axis; the first one of a byte is in its lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers: Array = (bytes_[..., None] >> shifts) & np.uint8(2**bits - 1)
    return numbers.reshape(*bytes_.shape[:-1], -1)


class Distance(NamedTuple):
    """How far a quantized weight is from its float one, counted in steps of its blocks' grids."""

    share: float
    """The share of the numbers that are more than a step away. Rounding to nearest leaves none: half a step, or a whole
    one at an end of the grid."""

    rows: list[int]
    """Outputs, or rows of a table, that are farther off than the others explain."""

    num_rows: int


def is_rotated(distances: Mapping[str, Distance]) -> bool:
    """Whether most products are so far from their float ones that factors of rows and columns cannot be found."""
    return bool(distances) and float(np.median([one.share for one in distances.values()])) > _ROTATED


def is_scaled(reference: Array, model: Array) -> bool:
    """Whether a float matrix has the reference's numbers, but for factors of its rows and columns."""
    size = min(_SAMPLED, len(model), len(reference))  # a table may have more rows than the other
    own, known = (array[:size].astype(np.float32) for array in (model, reference))
    ratios = np.divide(own, known, out=np.zeros_like(own), where=known != 0)
    rows = np.median(ratios, 1, keepdims=True)
    ratios = np.divide(ratios, rows, out=np.zeros_like(own), where=rows != 0)
    return bool(rows.any()) and float(np.median(np.abs(ratios - np.median(ratios, 0)))) < _ALIKE


def multipliers(weight: Array, grid: Grid, begin: int = 0) -> tuple[Array, Array]:
    """The logarithms of what the rows and the columns of a float weight [N, K] were multiplied by before it was
    rounded, by least squares: [N], [K]; the columns' of some parts of the rows. 0 where little of a row or column is
    left."""

    def moments(first: int) -> tuple[Array, Array]:
        floats = weight[first : first + _PART].astype(np.float32)
        numbers, _ = grid.rows(begin + first, begin + first + len(floats))
        return floats * np.nan_to_num(numbers), floats**2

    firsts = range(0, len(weight), _PART)
    some = [moments(first) for first in firsts[:: -(-len(firsts) // _MOST_PARTS)]]
    products_NK, squares_NK = (np.concatenate(parts) for parts in zip(*some, strict=True))
    columns_K = np.ones(weight.shape[1], np.float32)
    for _ in range(_FITS):
        rows_N = _fitted(products_NK @ columns_K, squares_NK @ columns_K**2)
        columns_K = _fitted(rows_N @ products_NK, rows_N**2 @ squares_NK)
    both = ((products @ columns_K, squares @ columns_K**2) for products, squares in map(moments, firsts))
    return np.log(np.concatenate([_fitted(*one) for one in both])), np.log(columns_K)


def _fitted(products: Array, squares: Array) -> Array:
    return np.where(products > _LEAST_FOLDED * squares, products / np.maximum(squares, 1e-30), 1)


def is_made_up_for(factors: Array, others: Iterable[Array]) -> bool:
    """Whether one of the `others` takes factors back that are not all alike: all are logarithms. Of a packed product
    the last rows are values or `up_proj`."""
    if not has_spread(factors):
        return False
    sizes = ((one, min(len(one), len(factors))) for one in others if has_spread(one))
    same = ((factors[-size:], one[-size:]) for one, size in sizes)
    return any((own + one).std() < _MOST_LEFT * min(own.std(), one.std()) + _LEAST_SPREAD / 2 for own, one in same)


def has_spread(factors: Array) -> bool:
    """Whether logarithms of factors differ by more than rounding leaves."""
    return bool(factors.std() > _LEAST_SPREAD)
