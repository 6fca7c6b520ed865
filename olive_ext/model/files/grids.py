"""Quantized weights as nodes store them: numbers of few bits, in blocks with one scale and zero point each; and how far
weights are from each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from olive_ext.graph.nodes import attribute

Array: TypeAlias = npt.NDArray[Any]

_LEAST_LIKENESS = 0.5
"""Below this cosine, two weights have nothing in common. Rounding leaves 0.9 at 2 bits and more at others, factors of
columns alone 1, those of rows and columns at once 0.8; rotations, other layers' weights, and zeros have about 0."""

_MOST_BY_CHANCE = 3.9
"""The largest cosine of a thousand random rows, as of another model, in multiples of 1 over the root of their size."""

_OTHER, _OTHER_OF_TWO = (0.3, 0.4, 0), (0.4, 0.8, 20)
"""By how much less the cosine of another token's row is than the best row's, the logarithm by which its size is
another, and how many times as far it is as the median row: training moves both by less than 0.1, grids of 2 bits by
0.1. Where both sides are rounded, each by its own algorithm, heavy tails make more of it."""

_FEWEST_FITTED, _MOST_FITTED = 8, 4096
"""Tokens to which two numbers for each column are fitted."""

_UNUSED = 1e-6
"""Rows whose squares are below this share of the median's are for no token: rounding turns them by any angle."""

_EXACT = 1e-4
"""Where the median row turns by less, as 1 less the cosine, the others are the reference's but for rounding. A row that
is nearer to another token's than to its own stands out of these. All rows of a head may have most in common."""

_SAME = 2.0**-14
"""Rounding to bfloat16 turns rows by less, as 1 less the cosine."""

AT_A_TIME = 1 << 22
"""Numbers that are in memory at a time."""

NEAREST_STEPS = 0.3
"""A weight counts as rounded to nearest where the mean distance of its median row is below this, in steps of the grid:
rounding to nearest leaves 0.25. Of other weights (GPTQ: 0.35 to 2) a row is held against four times the median, and no
single block is: one block may lie far off."""

ROW_STEPS, BLOCK_STEPS = 0.6, 1.5
"""Mean distances, in steps, from which on a row, or a block of one, was not rounded to nearest: at 4 bits, zero points
that are off by one make 1, and lost numbers 2.7."""

NEAREST_SIZE, ROW_SIZE, BLOCK_SIZE = 0.05, 0.2, 0.5
"""The same, relative to the mean size of the row's numbers: GPTQ moves small numbers by many steps of 8 bits."""

_NOTHING = 1e-3
"""Steps below this share of a weight's mean size count as this."""

_STEP = 1.01
"""The tolerance of scales in half precision, which are not exactly those used for rounding."""


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
    wrong axis of a square matrix), for blocks of inputs, or of outputs; None for other forms."""
    axis, block = attribute(node, "axis", 1) % 2, int(attribute(node, "block_size", 0))
    if stored.ndim != 2:
        return None
    parts = [scales, *([] if zeros is None else [zeros])]
    if scales.ndim < 2:
        parts = [part.reshape((1, -1) if axis else (-1, 1)) for part in parts]
    elif axis == int(is_turned):
        parts, block = [np.repeat(part, block, axis) for part in parts], 1
    stored, *parts = (part.T if is_turned else part for part in (stored, *parts))
    num_rows, num_inputs = stored.shape
    parts = [np.broadcast_to(part, (num_rows, part.shape[1])) for part in parts]
    block = block or num_inputs // parts[0].shape[1]
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


def likeness(blocks: Iterable[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The sums of products, and of both sides' squares, of the rows of two weights [3, N], and of their columns [3, K].
    `blocks`: some rows of both at a time, [R, K]."""
    rows, columns = [], np.zeros((3, 1))
    for reference, model in blocks:
        known, numbers = (np.nan_to_num(array.astype(np.float32), posinf=0, neginf=0) for array in (reference, model))
        products = np.stack([known * numbers, known**2, numbers**2])
        rows.append(products.sum(2))
        columns = columns + products.sum(1)
    return np.concatenate(rows, 1), columns


def _cosines(sums: Array) -> Array:
    """Those of zeros alone on both sides are alike."""
    products, known, numbers = sums
    cosines: Array = np.where(known + numbers > 0, products / np.sqrt(np.maximum(known * numbers, 1e-30)), 1.0)
    return cosines


def blocks_of(array: Array) -> Iterator[tuple[int, Array]]:
    """The number of the first row and the numbers, for each part of an array as rows [R, N]; a vector is one row."""
    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    step = max(1, AT_A_TIME // max(1, rows.shape[1]))
    yield from ((first, rows[first : first + step]) for first in range(0, len(rows), step))


def distance(weight: Array, grid: Grid, begin: int = 0) -> Distance:
    """The distance of a float weight [N, K] from the rows of its quantized one that begin at `begin`."""
    count, in_steps, in_size = 0, [], []
    for first, rows in blocks_of(weight):
        numbers, steps = grid.rows(begin + first, begin + first + len(rows))  # [R, K], [R, blocks]
        floats = rows.astype(np.float32)
        # A block of nearly nothing may have a scale that is no number in half precision.
        steps = np.maximum(steps, _NOTHING * float(np.abs(floats).mean()))
        with np.errstate(invalid="ignore", divide="ignore"):
            far = np.abs(floats - numbers)
            far = np.pad(far, ((0, 0), (0, steps.shape[1] * grid.block - far.shape[1]))).reshape(*steps.shape, -1)
            count += int((~(far <= _STEP * steps[..., None])).sum())
            far = far.mean(-1)
            in_steps.append(np.nan_to_num(far / steps, nan=np.inf))
            in_size.append(np.nan_to_num(far / np.maximum(np.abs(floats).mean(1, keepdims=True), 1e-30), nan=np.inf))
    blocks, sizes = np.concatenate(in_steps), np.concatenate(in_size)  # [N, blocks]
    rows = blocks.mean(1)
    usual = float(np.median(rows))
    is_nearest = usual < NEAREST_STEPS
    most, size = (ROW_STEPS, NEAREST_SIZE) if is_nearest else (4 * usual, ROW_SIZE)
    is_far = (rows > most) & (sizes.mean(1) > size)
    if is_nearest:
        is_far |= ((blocks > BLOCK_STEPS) & (sizes > BLOCK_SIZE)).any(1)
    return Distance(count / weight.size, np.flatnonzero(is_far).tolist(), len(rows))


def is_unlike(likeness: tuple[Array, Array]) -> bool:
    """Whether two weights have nothing in common. Factors of rows leave the cosines of rows as they are, factors of
    columns those of columns."""
    return all(float(np.median(_cosines(sums))) < _LEAST_LIKENESS for sums in likeness)


def likeness_to_grid(weight: Array, grid: Grid, begin: int = 0) -> tuple[Array, Array]:
    """The likeness of a quantized weight to its float one [N, K]; the arguments are those of `distance`."""
    return likeness(
        (block, grid.rows(begin + first, begin + first + len(block))[0]) for first, block in blocks_of(weight)
    )


def likeness_of(array: Array, other: Array) -> tuple[Array, Array]:
    """The `likeness` of two float weights, as far as both reach."""
    array, other = (one[tuple(map(slice, map(min, array.shape, other.shape)))] for one in (array, other))
    return likeness((left, right) for (_, left), (_, right) in zip(blocks_of(array), blocks_of(other), strict=True))


def factor_of(reference: Array, model: Array) -> float:
    """The factor by which a matrix is another one, to the precision of bfloat16; NaN where it is none."""
    (_, known, numbers), _ = likeness = likeness_of(reference, model)
    sizes = numbers[known > 0] / known[known > 0]
    is_turned = bool(_cosines(likeness[0]).min() < 1 - _SAME)
    is_one = not is_turned and len(sizes) > 0 and bool(np.ptp(sizes) < _SAME**0.5 * sizes.mean())
    return float(sizes.mean() ** 0.5) if is_one else float("nan")


def other_tokens(reference: Array, model: Array, axis: int | None = None) -> bool:
    """Whether some rows of a table, columns of a head, or parts of a stack have another direction or size than the
    reference's, while others have its: exchanged, scaled or lost ones. Training and rounding turn rows a little,
    rotations all of them, and multipliers scale all alike. Rows of zeros are for no token. A norm that is folded into
    a head multiplies each number of all tokens by a factor, and centring a head adds a term: tokens that fit to factors
    and terms, as the nearest tokens have them, do not stand out. `axis`: that of a matrix's tokens; the longer
    one where it is not known."""
    pair = [np.atleast_2d(array.squeeze()) for array in (reference, model)]
    is_stack = pair[0].ndim > 2
    if is_stack:
        pair = [array.reshape(len(array), -1) for array in pair]
    elif np.argmax(pair[0].shape) if axis is None or reference.ndim > 2 else axis:
        pair = [array.T for array in pair]
    both = tuple(map(slice, map(min, pair[0].shape, pair[1].shape)))
    return bool(_other_rows([array[both] for array in pair], is_stack=is_stack).any())


class _Decoded:
    """A quantized weight, whose rows are decoded when they are read."""

    def __init__(self, grid: Grid) -> None:
        self.shape, self._rows = grid.shape, grid.rows

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Array) -> Array:
        if isinstance(rows, slice):
            return self._rows(*rows.indices(len(self))[:2])[0]
        return np.concatenate([self._rows(row, row + 1)[0] for row in rows.tolist()])


def other_rows(reference: Grid, model: Grid) -> list[int]:
    """As `other_tokens`, the rows of two quantized tables or heads that stand out; none where their shapes differ, or
    where one has 2 bits, by which sound quantizers turn some rows as far (of 1,000 heavy-tailed ones, 4 to 20)."""
    pair: Any = [_Decoded(reference), _Decoded(model)]
    is_compared = reference.shape == model.shape and 2 not in (reference.bits, model.bits)
    return [*map(int, np.flatnonzero(_other_rows(pair, _OTHER_OF_TWO)))] if is_compared else []


def _other_rows(pair: Sequence[Array], least: tuple[float, float, int] = _OTHER, *, is_stack: bool = False) -> Array:
    num_rows, width = pair[0].shape
    size = max(1, AT_A_TIME // max(1, width))
    blocks = [slice(first, first + size) for first in range(0, num_rows, size)]
    sums, _ = likeness((pair[0][rows], pair[1][rows]) for rows in blocks)
    standing: Array = _stand_out(sums, width, least)
    is_read: Array = sums[1] > _UNUSED * np.median(sums[1])
    turned = 1 - _cosines(sums)
    if not is_stack and is_read.any() and np.median(turned[is_read]) < _EXACT:
        few = np.flatnonzero(is_read & (turned > _EXACT))[:_MOST_FITTED]
        standing[few] |= _are_nearer_to_others(pair, few, blocks)
        return standing
    if is_stack or not standing.any() or len(standing) < 4 * _FEWEST_FITTED:
        return standing
    nearest = np.sort(np.argsort(-_cosines(sums))[: min(len(standing) // 4, _MOST_FITTED)])
    known, own = (array[nearest].astype(np.float32) for array in pair)
    middle, center = known.mean(0), own.mean(0)
    known, own = known - middle, own - center
    factors = (known * own).sum(0) / np.maximum((known**2).sum(0), 1e-30)
    moved = center - middle * factors
    fitted, _ = likeness((pair[0][rows].astype(np.float32) * factors + moved, pair[1][rows]) for rows in blocks)
    others: Array = standing & _stand_out(fitted, width, least)
    return others


def _are_nearer_to_others(pair: Sequence[Array], few: Array, blocks: Iterable[slice]) -> Array:
    """Which of a `few` rows are nearer to another row of the reference's than to their own."""
    if not few.size:
        return few.astype(bool)
    known, own = (one[few].astype(np.float32) for one in pair)
    nearest = np.full(few.size, np.inf)
    for others in (pair[0][rows].astype(np.float32) for rows in blocks):
        squares = (own**2).sum(1)[:, None] + (others**2).sum(1) - 2 * own @ others.T
        nearest = np.minimum(nearest, squares.min(1))
    nearer: Array = 4 * nearest < ((own - known) ** 2).sum(1)
    return nearer


def _stand_out(sums: Array, width: int, least: tuple[float, float, int]) -> Array:
    """Which rows have another direction or size than the others have, by the `least` turn and scale. `sums`: their
    likeness [3, N]."""
    chance = _MOST_BY_CHANCE / width**0.5
    is_read: Array = sums[1] > _UNUSED * np.median(sums[1])
    if not is_read.any():
        return is_read
    cosines: Array = _cosines(sums)
    sizes: Array = np.log(np.maximum(sums[2], 1e-30) / np.maximum(sums[1], 1e-30)) / 2
    level = float(cosines[is_read].max())
    turned, scaled = 1 - cosines, np.abs(sizes - np.median(sizes[is_read]))
    least_turn = max(1 - level + least[0], least[2] * np.median(turned[is_read]))
    least_scale = max(least[1], least[2] * np.median(scaled[is_read]))
    is_turned = (turned > least_turn) & (level > max(_LEAST_LIKENESS, chance))
    is_scaled = (cosines > _LEAST_LIKENESS) & (scaled > least_scale)
    standing: Array = is_read & (is_turned | is_scaled)
    return standing
