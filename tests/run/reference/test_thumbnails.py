"""Thumbnails of the documents that flip, from a task's own pictures."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from olive_ext.backends.task_loading import load_tasks
from olive_ext.media.pictures import data_of_url
from olive_ext.run.reference.pairing import MOST_THUMBNAILS, thumbnails_of
from tests.families.pictures import picture

TASKS = Path(__file__).parents[3] / "recipes" / "vision" / "tasks"


def task(pictures: Any) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(doc_to_image="image"), eval_docs=[{}], doc_to_image=lambda doc: pictures
    )


def test_document_of_a_picture_task_has_its_own_picture() -> None:
    (loaded,) = load_tasks(["shapes_colour"], str(TASKS)).tasks.values()
    (url,) = thumbnails_of(loaded, 3)
    assert Image.open(io.BytesIO(data_of_url(url))).size == loaded.eval_docs[3]["image"].size
    assert url != thumbnails_of(loaded, 4)[0]


def test_few_pictures_of_a_document_are_shown_and_none_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    assert len(thumbnails_of(task([picture(0, 8, 8)] * 9), 0)) == MOST_THUMBNAILS
    assert len(thumbnails_of(task(picture(0, 8, 8)), 0)) == 1
    assert thumbnails_of(SimpleNamespace(), 0) == (), "a document of a text"
    assert thumbnails_of(task([b"no picture"]), 0) == ()
    assert "document 0: " in caplog.text
