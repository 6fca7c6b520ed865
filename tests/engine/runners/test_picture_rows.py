"""Rows of one step with different pictures get each its own features."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from olive_ext.config import ModelSettings
from olive_ext.engine.media import MediaItem, MediaRun, rotary_positions, rows_within
from olive_ext.engine.runners.ort.inputs import Layout
from olive_ext.engine.runners.ort.opener import Opener
from olive_ext.engine.step import Row
from olive_ext.media import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.compiled import Compiled
from olive_ext.model.media_types import Modality
from olive_ext.model.types import Device
from tests.exports.media import plain_encoder_export
from tests.families.pictures import picture


class Bound:
    """Stands for the decoder's binding."""

    def __init__(self) -> None:
        self.values: dict[str, npt.NDArray[np.float32]] = {}

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        self.values[name] = value.numpy()


@pytest.mark.slow
def test_rows_of_one_step_have_the_embeddings_of_each_row_alone() -> None:
    model = resolve(ModelSettings(model=str(plain_encoder_export("f32", "default"))))
    assert model.media is not None
    processor = MediaProcessor(model.media, model.files)
    embedding = Opener(model, None, Compiled(model.settings.engine)).embedding(model.spec, Device("cpu"))
    items = [processor.item(Modality.IMAGE, picture(seed, 40, 40)) for seed in (0, 1)]
    # Positions 3 to 12 of sequences whose pictures begin at 1 and at 5: the end of one, the beginning of the other.
    rows = [
        Row(slot, 3, tuple(range(100, 110)), media=(MediaRun(start, item),))
        for slot, (start, item) in enumerate(zip((1, 5), items, strict=True))
    ]

    def embedded(*given: Row) -> npt.NDArray[np.float32]:
        bound = Bound()
        embedding.bind(Layout.of(given), bound, None)  # type: ignore[arg-type]
        return bound.values["inputs_embeds"]

    together = embedded(*rows)
    assert together.shape == (2, 10, 64)
    np.testing.assert_array_equal(together, np.concatenate([embedded(row) for row in rows]))
    assert not np.array_equal(together[0], together[1])


def _item(num_tokens: int, grid: tuple[int, int, int] | None) -> MediaItem:
    return MediaItem(Modality.IMAGE, "key", num_tokens, 9, dict, grid)


def test_rotary_positions_are_qwen2_vls() -> None:
    """A text of 2, a picture of 2 x 3, a text of 2, a picture of 2 x 2, a text of 1; numbers counted by hand."""
    media = (MediaRun(2, _item(6, (1, 2, 3))), MediaRun(10, _item(4, (1, 2, 2))))
    found = rotary_positions(media, range(15))
    assert found[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 7, 7, 9]
    assert found[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 8, 8, 9]
    assert found[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9]
    np.testing.assert_array_equal(rotary_positions(media, range(7, 12)), found[:, 7:12])


def test_items_without_a_grid_have_the_positions_of_text() -> None:
    assert rotary_positions((MediaRun(1, _item(3, None)),), range(6))[2].tolist() == list(range(6))


def test_rows_within_are_those_of_the_positions_asked_for() -> None:
    media = (MediaRun(2, _item(4, None)), MediaRun(8, _item(2, None)))
    found = [(place, rows.first, rows.stop) for place, rows in rows_within(media, 4, 9)]
    assert found == [(4, 2, 4), (8, 0, 1)]
