"""What an encoder is given of an item, and what it returns, as arrays: by name, joined, compared. Knows no session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media import filled_up
from olive_ext.errors import ModelError
from olive_ext.model.media_types import MediaEncoderSpec
from olive_ext.model.role_inputs import DTYPES
from olive_ext.model.types import TensorSpec

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_FLOATS = {1: np.float32, 10: np.float16, 11: np.float64}

_ALIASES = {
    "pixel_position_ids": "image_position_ids",
    "image_position_ids": "pixel_position_ids",
    "input_features": "audio_features",
    "audio_values": "input_features",
    "grid_thw": "image_grid_thw",
    "feature_attention_mask": "input_features_mask",
}
"""The processor's name for what an exporter calls otherwise."""

ROUNDING = {8: 1e-5, 4: 1e-5, 2: 2e-3}
"""For the bytes of a number: the most that features may be off beside others, relative to the largest."""


def fitted(tensor: TensorSpec, arrays: Mapping[str, Array], spec: MediaEncoderSpec) -> Array:
    """The processor's array for an input of an encoder: of its name or another known for the same, in its type.

    An axis for a single item is added or taken away. Raises `ModelError` where there is none, or its shape does not
    fit.
    """
    array = arrays.get(tensor.name, arrays.get(_ALIASES.get(tensor.name, "")))
    if array is None:
        raise ModelError(
            f"'{spec.files.graph}' takes '{tensor.name}'; the processor gives {', '.join(sorted(arrays))}: another one "
            "is needed"
        )
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
    return np.ascontiguousarray(array, {**_FLOATS, **DTYPES}[tensor.elem_type])


def difference_of(expected: Sequence[Array], found: Sequence[Array]) -> str:
    """How far the features [N, H] of an item are from those expected, of each output; empty where that is rounding."""
    for other, own in zip(expected, found, strict=True):
        if own.shape != other.shape:
            return f"are {len(own)} rows, not {len(other)}"
        largest = np.abs(own.astype(np.float64) - other).max() / max(np.abs(other).max(), 1e-30)
        if not largest <= ROUNDING[own.dtype.itemsize]:
            return f"are {largest:.2g} of the largest off"
    return ""


def joined(items: Sequence[Arrays]) -> Arrays:
    """Arrays of several items, one behind the other; zeros fill them up to the longest, which masks then tell."""
    return items[0] if len(items) == 1 else {name: filled_up([arrays[name] for arrays in items]) for name in items[0]}


def is_padded(arrays: Arrays, other: Arrays) -> bool:
    """Whether one of two items would be filled up beside the other: axes behind the first differ."""
    return any(array.shape[1:] != other[name].shape[1:] for name, array in arrays.items())


def real_rows(told: Array, num_rows: int) -> Array:
    """The rows of features [B, rows] that are not of padding: by the number of each item's [B], or by a mask
    [B, rows]."""
    return np.flatnonzero(np.arange(num_rows) < told[:, None] if told.ndim == 1 else told)
