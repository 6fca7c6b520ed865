"""The shapes that an encoder is run with: buckets for pictures of any size, and which were run beforehand.

An encoder of patches with a grid takes several pictures one behind the other, so a bucket is filled with one more: a
tail of zeros with a grid of its own, which no picture's patches attend to. Encoders of one size have one shape anyway.
Knows no session.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media import MediaItem, token_bucket
from olive_ext.errors import RunError
from olive_ext.model.media_types import MediaEncoderSpec

Arrays = Mapping[str, npt.NDArray[Any]]
Shape = tuple[tuple[int, ...], ...]


class EncoderShapes:
    """What one encoder has been run with. Without `is_bucketed` inputs keep their shapes; with `is_strict` a shape that
    was not run beforehand raises `RunError`."""

    def __init__(self, spec: MediaEncoderSpec, *, is_bucketed: bool = False, is_strict: bool = False) -> None:
        self._spec = spec
        self._is_strict = is_strict
        self._grid = next((tensor.name for tensor in spec.inputs if "grid" in tensor.name), None)
        self.is_bucketed = is_bucketed
        self._met: set[Shape] = set()
        self._late: set[Shape] = set()
        self._is_frozen = False

    def freeze(self) -> None:
        """All shapes that are expected have been run."""
        self._is_frozen = True

    def padded(self, inputs: Arrays, item: MediaItem) -> tuple[Arrays, int]:
        """The inputs in their bucket, and the rows of features that the encoder returns for them."""
        if not self.is_bucketed or self._grid is None:
            return inputs, item.num_tokens
        patches = next(name for name in inputs if name != self._grid)
        unit = len(inputs[patches]) // item.num_tokens
        bucket = token_bucket(item.num_tokens)
        tail = bucket - item.num_tokens
        zeros = np.zeros((tail * unit, *inputs[patches].shape[1:]), inputs[patches].dtype)
        grid = np.array([[1, isqrt(unit), tail * isqrt(unit)]], inputs[self._grid].dtype)
        filled = {patches: (inputs[patches], zeros), self._grid: (inputs[self._grid], grid)}
        return {
            name: np.concatenate(filled[name]) if name in filled else array for name, array in inputs.items()
        }, bucket

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
