"""Small pictures of what a document shows, for the page of flipped documents. Knows no report."""

from __future__ import annotations

import logging
from typing import Any

from olive_ext.errors import first_line
from olive_ext.media.pictures import thumbnail

logger = logging.getLogger(__name__)

MOST = 4
"""Thumbnails of one document; others are left out."""


def thumbnails_of(task: Any, doc_id: int) -> tuple[str, ...]:
    """Data URLs of the first pictures of a task's document; none where it has none, or its code gives none. (A sample
    has digests in place of pictures.)"""
    if getattr(getattr(task, "config", None), "doc_to_image", None) is None:
        return ()
    try:
        pictures = task.doc_to_image(task.eval_docs[doc_id])
        given = pictures if isinstance(pictures, list | tuple) else [pictures]
        return tuple(map(thumbnail, given[:MOST]))
    except Exception as error:  # noqa: BLE001 - whatever a task's code throws: the numbers may have taken hours
        logger.warning("no thumbnails of document %d: %s", doc_id, first_line(error))
        return ()
