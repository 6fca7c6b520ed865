"""What an encoder is given of an item, and what it returns, as arrays by name. Knows no session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media.items import filled_up
from olive_ext.errors import ModelError
from olive_ext.model.spec.media_types import MediaEncoderSpec
from olive_ext.model.spec.role_inputs import DTYPES
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


def fitted(tensor: TensorSpec, arrays: Mapping[str, Array], spec: MediaEncoderSpec) -> Array:
    """The processor's array for an input of an encoder, by its name or another for the same, in its type and shape.

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


def joined(items: Sequence[Arrays]) -> Arrays:
    """Arrays of several items, one behind the other on axis 0, each filled up by zeros to the longest: [sum, ...]."""
    return items[0] if len(items) == 1 else {name: filled_up([arrays[name] for arrays in items]) for name in items[0]}


def is_padded(arrays: Arrays, other: Arrays) -> bool:
    """Whether one of two items would be filled up beside the other: axes behind the first differ."""
    return any(array.shape[1:] != other[name].shape[1:] for name, array in arrays.items())


def real_rows(told: Array, num_rows: int) -> Array:
    """The rows of features [B, rows] that are not of padding: by each item's number [B], or a mask [B, rows]."""
    return np.flatnonzero(np.arange(num_rows) < told[:, None] if told.ndim == 1 else told)
