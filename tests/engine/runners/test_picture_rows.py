"""Rows of one step with different pictures get each its own features."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from olive_ext.media.items import MediaItem, MediaRun, runs_within
from olive_ext.model.types import Modality


class Bound:
    """Stands for the decoder's binding."""

    def __init__(self) -> None:
        self.values: dict[str, npt.NDArray[np.float32]] = {}

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        self.values[name] = value.numpy()


def _item(num_tokens: int, grid: tuple[int, int, int] | None) -> MediaItem:
    return MediaItem(Modality.IMAGE, "key", num_tokens, 9, dict, grid)


MEDIA = (MediaRun(2, _item(4, None)), MediaRun(6, _item(3, None)), MediaRun(11, _item(2, None)))
"""Text at positions 0 and 1, 9 and 10, and from 13 on."""


def test_runs_within_are_those_of_the_positions_asked_for() -> None:
    assert runs_within(MEDIA, 0, 2) == []
    assert runs_within(MEDIA, 2, 9) == list(MEDIA[:2])
    assert runs_within(MEDIA, 9, 20) == list(MEDIA[2:])
    with pytest.raises(AssertionError, match="cuts an item"):
        runs_within(MEDIA, 0, 8)
