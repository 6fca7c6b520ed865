"""The shapes that an encoder is run with: buckets for pictures of any size, and which were run beforehand.

An encoder of patches with a grid takes several pictures one behind the other, so a bucket is filled with more: tails of
zeros with a grid of their own, which no picture's patches attend to. One picture has one tail; several, up to
`MOST_GRIDS`, have so many that their grids are one more than that. Encoders of one size have one shape anyway. Knows no
session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media import MediaItem, token_bucket, token_buckets
from olive_ext.errors import RunError
from olive_ext.model.media_types import MediaEncoderSpec

Arrays = Mapping[str, npt.NDArray[Any]]
Shape = tuple[tuple[int, ...], ...]


MOST_GRIDS = 7
"""Pictures in a run at most."""


class Bucket(NamedTuple):
    """Pictures with their tails: how many grids, and tokens of all."""

    grids: int
    tokens: int


def bucket_of(count: int, num_tokens: int) -> Bucket:
    """The bucket of so many pictures with `num_tokens` together: each of its tails has a token at least."""
    grids = 2 if count == 1 else MOST_GRIDS + 1
    return Bucket(grids, token_bucket(num_tokens + grids - count - 1))


class EncoderShapes:
    """What one encoder has been run with. Without `is_bucketed` inputs keep their shapes; with `is_strict` a shape that
    was not run beforehand raises `RunError`."""

    def __init__(self, spec: MediaEncoderSpec, *, is_bucketed: bool = False, is_strict: bool = False) -> None:
        self._spec = spec
        self._is_strict = is_strict
        self._grid = spec.grid
        self.is_bucketed = is_bucketed
        self._met: set[Shape] = set()
        self._late: set[Shape] = set()
        self._is_frozen = False

    def freeze(self) -> None:
        """All shapes that are expected have been run."""
        self._is_frozen = True

    def padded(self, inputs: Arrays, items: Sequence[MediaItem], bucket: Bucket | None = None) -> tuple[Arrays, int]:
        """The items' inputs in their bucket, or in another, and the rows of features that the encoder returns for
        them."""
        num_tokens = sum(item.num_tokens for item in items)
        if not self.is_bucketed or self._grid is None:
            return inputs, num_tokens
        grids, size = bucket or bucket_of(len(items), num_tokens)
        patches = next(name for name in inputs if name != self._grid)
        unit = len(inputs[patches]) // num_tokens
        ones = grids - len(items) - 1  # all tails but the last have one token
        zeros = np.zeros(((size - num_tokens) * unit, *inputs[patches].shape[1:]), inputs[patches].dtype)
        tails = [1] * ones + [size - num_tokens - ones]
        grid = np.array([[1, isqrt(unit), tail * isqrt(unit)] for tail in tails], inputs[self._grid].dtype)
        more = {patches: zeros, self._grid: grid}
        return {name: np.concatenate([array, more[name]]) for name, array in inputs.items()}, size

    def shared_buckets(self, items: Sequence[MediaItem], max_rows: int) -> list[Bucket]:
        """Those of several pictures with up to `max_rows` tokens together, where `items` are the smallest to the
        largest there are. The smallest fits into each of them."""
        if not self.is_bucketed or self._grid is None or not items or 2 * items[0].num_tokens > max_rows:
            return []
        largest = bucket_of(2, min(max_rows, MOST_GRIDS * items[-1].num_tokens)).tokens
        sizes = [size for size in token_buckets(largest - 1) if size >= items[0].num_tokens + MOST_GRIDS]
        return [Bucket(MOST_GRIDS + 1, size) for size in sizes]

    def note(self, inputs: Arrays) -> None:
        """Counts the shape of a run that is about to happen. Raises `RunError` where it may not."""
        shape = tuple(array.shape for array in inputs.values())
        if not self._is_frozen or shape in self._met:
            self._met.add(shape)
            return
        if self._is_strict:
            shown = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
            raise RunError(
                f"'engine.strict_shapes' = true: the {self._spec.modality.value} encoder was not run with {shown} "
                "beforehand"
            )
        self._late.add(shape)

    def describe(self) -> Mapping[str, Any]:
        """Shapes run beforehand, where they were, and those met later."""
        if not self._is_frozen:
            return {}
        return {"encoder_shapes_warmed": len(self._met), "encoder_shapes_late": len(self._late)}
