"""How far two kernels' results may be apart: by what rounding of the inputs does to them. Knows no graph.

A kernel adds up in its own order and rounds in between, which is as if its inputs were others in their last bit. So
the same node, run on inputs that were moved by that much, shows how far results may be apart. Axes: R rows, C numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FACTOR = 8
"""Times what moved inputs do, and times the type's unit. WebGPU against the CPU, ten exports (fp32, fp16 against fp32,
int4): of 661 outputs the farthest is at 0.36 of its tolerance."""

FACTOR_ALIKE = 2
"""The same where one kernel computes both. In float16 a product 1 % too large is at 1.3 to 1.7 of it; by two numbers of
threads or levels of optimizations single nodes were equal."""

LEAST_ROW = 16
"""Numbers of a row that are judged by themselves; with fewer all rows are one."""

INT8 = 2.0**-10
"""The unit of activations that a kernel rounds to 8 bits, relative to the largest of their row: a quarter of a step,
since `FACTOR` is large for a rounding that is no sum. WebGPU and the CPU are 0.05 of a whole step's tolerance apart."""


@dataclass(frozen=True)
class Judged:
    """One value in two places."""

    error: float
    """The largest difference, in the row that is farthest beyond its tolerance."""

    tolerance: float

    @property
    def ratio(self) -> float:
        """Above 1 no rounding explains it."""
        return self.error / self.tolerance if self.tolerance else float("inf") if self.error else 0.0


def moved(values: Mapping[str, Array], units: Mapping[str, float]) -> dict[str, Array]:
    """Each array of floats with its numbers moved up or down, at random, by `units` times their size, or where
    that is `INT8` the largest of their row."""
    rng, found = np.random.default_rng(0), dict(values)
    for name, array in values.items():
        if array.dtype.kind == "f" and array.size:
            unit = units[name]
            sizes = np.abs(array)
            if unit == INT8 and array.ndim:
                sizes = sizes.max(axis=-1, keepdims=True)
            signs = rng.integers(0, 2, array.shape) * 2 - 1
            with np.errstate(all="ignore"):
                other = (array + sizes * unit * signs).astype(array.dtype)
            found[name] = np.where(np.isfinite(other), other, array)
    return found


def unit_of(*arrays: Array) -> float:
    """The distance of numbers near 1 in the coarsest floating type of `arrays`; 0 of integers."""
    return max(float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0 for array in arrays)


def judge(
    found: Array, expected: Array, response: Array, unit: float, *, steps: int = 0, factor: int = FACTOR
) -> Judged:
    """`found` against `expected`; `response` is what came of moved inputs where `expected` did of the given ones, and
    `unit` the rounding of the type. Integers are equal, or as far apart as moved inputs bring them and `steps`."""
    if found.shape != expected.shape:
        return Judged(float("inf"), 0.0)
    if not expected.size:
        return Judged(0.0, 0.0)
    wide = np.float64 if expected.dtype.kind == "f" else np.int64
    if expected.dtype.kind == "f":
        ends = [np.finfo(array.dtype).max for array in (found, expected)]
        found, expected, response = (np.clip(array, -min(ends), min(ends)) for array in (found, expected, response))
    by_row = (-1, expected.shape[-1]) if expected.ndim and expected.shape[-1] >= LEAST_ROW else (1, -1)
    found_RC, expected_RC, response_RC = (array.astype(wide).reshape(by_row) for array in (found, expected, response))
    error_R = _distances(found_RC, expected_RC).max(axis=1)
    response_R = _distances(response_RC, expected_RC).max(axis=1)
    sizes_RC = np.abs(expected_RC)
    size_R = np.where(np.isfinite(sizes_RC), sizes_RC, 0).max(axis=1)
    if wide is np.int64:
        worst = int(error_R.argmax())
        return Judged(float(error_R[worst]), float(response_R.max() + steps))
    tolerance_R = factor * (response_R + unit * size_R)
    with np.errstate(all="ignore"):
        ratio_R = np.where(error_R > 0, error_R / tolerance_R, 0)
    worst = int(np.nan_to_num(ratio_R, nan=np.inf, posinf=np.inf).argmax())
    return Judged(float(error_R[worst]), float(tolerance_R[worst]))


def _distances(one: Array, other: Array) -> Array:
    """Equal infinities are no distance, and neither are two NaN; one NaN is an infinite one."""
    with np.errstate(all="ignore"):
        apart: Array = np.abs(one - other).astype(np.float64)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0
    np.nan_to_num(apart, copy=False, nan=np.inf, posinf=np.inf)
    return apart
