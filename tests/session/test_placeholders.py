"""Markers of pictures and sounds: what a model's files do not name costs the pictures, not the texts."""

from __future__ import annotations

from pathlib import Path

from olive_ext.errors import TaskError
from olive_ext.media.items import ItemLimit
from olive_ext.media.processor import MediaProcessor
from olive_ext.model.spec.media_types import MediaInput, MediaSpec, Modality
from olive_ext.session.placeholders import MediaText, read_markers
from tests.refusals import refused
from tests.session.tiny import IM_START, byte_level, model_files

PLACEHOLDER = 300


def _read(tmp_path: Path, config: dict[str, object]) -> MediaText:
    files = model_files(tmp_path, config=config)
    processor = MediaProcessor(MediaSpec((MediaInput(Modality.IMAGE, PLACEHOLDER),)), files)
    return read_markers(processor, files, byte_level(), ItemLimit())


def test_text_needs_no_token_around_pictures(tmp_path: Path) -> None:
    media = _read(tmp_path, {"model_type": "gemma4"})
    assert media.insert_items([5, 6, 7], []) == ([5, 6, 7], ())
    with refused(TaskError, "unsupported", holds="boi_token"):
        media.insert_items([5, 6, 7], [object()])


def test_tokens_around_a_picture_are_those_of_config_json(tmp_path: Path) -> None:
    media = _read(tmp_path, {"model_type": "gemma4", "boi_token_id": IM_START, "eoi_token_id": 9})
    assert (media.markers[Modality.IMAGE].before, media.markers[Modality.IMAGE].after) == ((IM_START,), (9,))
