"""What an encoder is given of an item, and what it returns, as arrays by name; and the few shapes that it and the
graphs behind it are run with: buckets of items, and pieces of features.

An encoder of patches with a grid takes several pictures one behind the other, so a bucket is filled with more: tails of
zeros with a grid of their own, which no picture's patches attend to. One picture has one tail; several, up to
`MOST_GRIDS`, have so many that their grids are one more than that. Sounds with a mask are filled up to one of a few
lengths. Encoders of one size have one shape anyway. Knows no session.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media.items import MediaItem, filled_up, token_bucket, token_buckets
from olive_ext.errors import ModelError
from olive_ext.model.spec.media_types import MediaEncoderSpec
from olive_ext.model.spec.role_inputs import DTYPES
from olive_ext.model.types import TensorSpec

Rows = npt.NDArray[np.int64]
MOST_GRIDS = 7
"""Pictures in a run at most."""

PIECE = 64
"""Rows of a piece of features, where items have different numbers of tokens. What is picked from an encoder's output
and put among a step's features is a piece, so that the shapes of both graphs are as many as those of outputs and of
steps, and not as their products with the sizes of items."""


class Bucket(NamedTuple):
    """Pictures with their tails: how many grids, and tokens of all."""

    grids: int
    tokens: int


def bucket_of(count: int, num_tokens: int) -> Bucket:
    """The bucket of so many pictures with `num_tokens` together: each of its tails has a token at least."""
    grids = 2 if count == 1 else MOST_GRIDS + 1
    return Bucket(grids, token_bucket(num_tokens + grids - count - 1))


class EncoderShapes:
    """How one encoder's inputs are padded and its features cut. Without `is_bucketed` neither is."""

    def __init__(self, spec: MediaEncoderSpec, *, is_bucketed: bool = False) -> None:
        self._spec = spec
        self._grid = spec.grid
        self._lengths: list[int] = []
        self.piece = PIECE
        """Rows of a piece of features."""

        self.is_bucketed = is_bucketed
        self.is_padding_due = is_bucketed and (spec.grid is not None or spec.has_mask)
        """Whether it is still to be tried if padding changes an item's features."""

        self.problem = ""
        """Why inputs are not padded."""

    def learn(self, num_tokens: Iterable[int], inputs: Iterable[Arrays]) -> None:
        """Takes what is expected from items of every shape: the rows of a piece, and the lengths that masks have."""
        sizes = set(num_tokens)
        self.piece = sizes.pop() if len(sizes) == 1 else PIECE
        self._lengths = sorted({length for arrays in inputs if (length := self._length(arrays)) is not None})

    def note_trial(self, problem: str) -> None:
        """Padding was tried: because of a `problem` inputs keep their shapes."""
        self.is_padding_due, self.problem = False, problem

    def whole(self, num_rows: int) -> int:
        """Rows that an encoder's output must have to be an item's features as it is; none has -1."""
        return num_rows if not self.is_bucketed or num_rows == self.piece else -1

    def pieces(self, rows_N: Rows) -> list[Rows]:
        """Numbers of rows, `rows_N` [N], in pieces [`piece`], the last one filled up with the first row."""
        if not self.is_bucketed:
            return [rows_N]
        filled = np.concatenate([rows_N, np.full(-len(rows_N) % self.piece, rows_N[0])])
        return list(filled.reshape(-1, self.piece))

    def filled(self, inputs: Arrays) -> Arrays:
        """The item's inputs with zeros up to the next length that was expected, which its mask tells."""
        own = self._length(inputs)
        if own is None or self.problem or not self.is_bucketed or not own <= max(self._lengths, default=0):
            return inputs
        more = self._lengths[bisect_left(self._lengths, own)] - own
        shapes = {tensor.name: tensor.shape for tensor in self._spec.inputs}
        return {
            name: np.pad(
                array, [(0, more * (axis > 0 and isinstance(shapes[name][axis], str))) for axis in range(array.ndim)]
            )
            for name, array in inputs.items()
        }

    def _length(self, inputs: Arrays) -> int | None:
        return next((array.shape[1] for name, array in inputs.items() if "mask" in name), None)

    def padded(self, inputs: Arrays, items: Sequence[MediaItem], bucket: Bucket | None = None) -> tuple[Arrays, int]:
        """The items' inputs in their bucket, or in another, and the rows of features that come of them."""
        num_tokens = sum(item.num_tokens for item in items)
        if not self.is_bucketed or self._grid is None or self.problem:
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
        """The buckets of several pictures with up to `max_rows` tokens; `items`: smallest to largest."""
        if not self.is_bucketed or self._grid is None or not items or 2 * items[0].num_tokens > max_rows:
            return []
        largest = bucket_of(2, min(max_rows, MOST_GRIDS * items[-1].num_tokens)).tokens
        sizes = [size for size in token_buckets(largest - 1) if size >= items[0].num_tokens + MOST_GRIDS]
        return [Bucket(MOST_GRIDS + 1, size) for size in sizes]


Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_ALIASES = {
    "pixel_position_ids": "image_position_ids",
    "image_position_ids": "pixel_position_ids",
    "input_features": "audio_features",
    "audio_values": "input_features",
    "grid_thw": "image_grid_thw",
    "feature_attention_mask": "input_features_mask",
}
"""The processor's name for what an exporter calls otherwise."""


def fitted(tensor: TensorSpec, arrays: Mapping[str, Array], spec: MediaEncoderSpec) -> Array:
    """The processor's array for an input of an encoder, by its name or another for the same, in its type and shape.

    An axis for a single item is added or taken away. Raises `ModelError` where there is none, or its shape does not
    fit.
    """
    array = arrays.get(tensor.name, arrays.get(_ALIASES.get(tensor.name, "")))
    if array is None:
        raise ModelError(f"'{spec.files.graph}' takes '{tensor.name}'; the processor gives {', '.join(sorted(arrays))}")
    shape = array.shape
    if len(shape) == len(tensor.shape) + 1 and shape[0] == 1:
        array = array[0]
    elif len(shape) + 1 == len(tensor.shape):
        array = array[None]
    wrong = [
        size
        for size, wanted in zip(array.shape, tensor.shape, strict=False)
        if isinstance(wanted, int) and size != wanted
    ]
    if len(array.shape) != len(tensor.shape) or wrong:
        raise ModelError(
            f"'{spec.files.graph}' takes '{tensor.name}' {list(tensor.shape)}; the processor gives {list(shape)}"
        )
    return np.ascontiguousarray(array, DTYPES[tensor.elem_type])


def joined(items: Sequence[Arrays]) -> Arrays:
    """Arrays of several items, one behind the other on axis 0, each filled up by zeros to the longest: [sum, ...]."""
    return items[0] if len(items) == 1 else {name: filled_up([arrays[name] for arrays in items]) for name in items[0]}


def is_padded(arrays: Arrays, other: Arrays) -> bool:
    """Whether one of two items would be filled up beside the other: axes behind the first differ."""
    return any(array.shape[1:] != other[name].shape[1:] for name, array in arrays.items())


def real_rows(told: Array, num_rows: int) -> Array:
    """The rows of features [B, rows] that are not of padding: by each item's number [B], or a mask [B, rows]."""
    return np.flatnonzero(np.arange(num_rows) < told[:, None] if told.ndim == 1 else told)
