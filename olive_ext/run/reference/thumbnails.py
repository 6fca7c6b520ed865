"""Small pictures of what a document shows, for the page of flipped documents. Knows no report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from olive_ext.errors import TaskError
from olive_ext.media.pictures import thumbnail

MOST = 4
"""Thumbnails of one document; others are left out."""


def thumbnails_of(arguments: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """Data URLs of the first pictures in the arguments of a document's requests, which show the same ones; none for
    what cannot be read."""
    given = next((one[2] for one in arguments if len(one) > 2 and isinstance(one[2], Mapping)), {})
    pictures = given.get("visual") or ()
    found = []
    for picture in pictures if isinstance(pictures, list | tuple) else [pictures]:
        try:
            found.append(thumbnail(picture))
        except TaskError:
            continue
        if len(found) == MOST:
            break
    return tuple(found)
