"""Rows of one step with different pictures get each its own features."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from olive_ext.config import ModelSettings
from olive_ext.engine.runners.ort.inputs import Layout
from olive_ext.engine.runners.ort.opening import Sessions
from olive_ext.engine.step import Row, Step
from olive_ext.media.items import MediaItem, MediaRun, border, chunk_end, rotary_positions, runs_within
from olive_ext.media.processor import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.providers.compiled import Compiled
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import Modality
from tests.exports.media import plain_encoder_export
from tests.families.pictures import picture


class Bound:
    """Stands for the decoder's binding."""

    def __init__(self) -> None:
        self.values: dict[str, npt.NDArray[np.float32]] = {}

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        self.values[name] = value.numpy()


def test_rows_of_one_step_have_the_embeddings_of_each_row_alone() -> None:
    model = resolve(ModelSettings(model=str(plain_encoder_export("f32", "default"))))
    assert model.media is not None
    processor = MediaProcessor(model.media, model.files)
    embedding = Sessions(model, Compiled(model.settings.engine)).embedding(model.spec, Device("cpu"))
    items = [processor.item(Modality.IMAGE, picture(seed, 40, 40)) for seed in (0, 1)]
    # Positions 3 to 22 of sequences whose pictures begin at 4 and at 6.
    rows = [
        Row(slot, 3, tuple(range(100, 120)), media=(MediaRun(start, item),))
        for slot, (start, item) in enumerate(zip((4, 6), items, strict=True))
    ]

    def embedded(*given: Row) -> npt.NDArray[np.float32]:
        bound = Bound()
        layout = Layout.of(Step(given))
        embedding.bind(layout, layout.items, bound)  # type: ignore[arg-type]
        return bound.values["inputs_embeds"]

    together = embedded(*rows)
    assert together.shape == (2, 20, 64)
    np.testing.assert_array_equal(together, np.concatenate([embedded(row) for row in rows]))
    assert not np.array_equal(together[0], together[1])


def _item(num_tokens: int, grid: tuple[int, int, int] | None) -> MediaItem:
    return MediaItem(Modality.IMAGE, "key", num_tokens, 9, dict, grid)


def test_rotary_positions_are_qwen2_vls() -> None:
    """A text of 2, a picture of 2 x 3, a text of 2, a picture of 2 x 2, a text of 1; numbers counted by hand. Items
    without a grid have the positions of text."""
    media = (MediaRun(2, _item(6, (1, 2, 3))), MediaRun(10, _item(4, (1, 2, 2))))
    found = rotary_positions(media, range(15))
    assert found[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 7, 7, 9]
    assert found[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 8, 8, 9]
    assert found[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9]
    np.testing.assert_array_equal(rotary_positions(media, range(7, 12)), found[:, 7:12])
    assert rotary_positions((MediaRun(1, _item(3, None)),), range(6))[2].tolist() == list(range(6))


MEDIA = (MediaRun(2, _item(4, None)), MediaRun(6, _item(3, None)), MediaRun(11, _item(2, None)))
"""Text at positions 0 and 1, 9 and 10, and from 13 on."""


def test_runs_within_are_those_of_the_positions_asked_for() -> None:
    assert runs_within(MEDIA, 0, 2) == []
    assert runs_within(MEDIA, 2, 9) == list(MEDIA[:2])
    assert runs_within(MEDIA, 9, 20) == list(MEDIA[2:])
    with pytest.raises(AssertionError, match="cuts an item"):
        runs_within(MEDIA, 0, 8)


def test_borders_and_ends_of_chunks_are_positions_where_no_item_is_cut() -> None:
    assert [border(MEDIA, position) for position in range(15)] == [0, 1, 2, 2, 2, 2, 6, 6, 6, 9, 10, 11, 11, 13, 14]
    assert [border(MEDIA, position, 2) for position in range(15)] == [0, 0, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 14]
    assert [chunk_end(MEDIA, 0, stop) for stop in (1, 3, 5, 6, 8, 10)] == [1, 2, 2, 6, 6, 10]
    assert [chunk_end(MEDIA, 2, stop) for stop in (3, 8, 9)] == [6, 6, 9]
    assert chunk_end(MEDIA, 6, 9, 2) == 9  # no multiple of 2 is a border within the chunk
    assert chunk_end(MEDIA, 9, 13, 2) == 10
