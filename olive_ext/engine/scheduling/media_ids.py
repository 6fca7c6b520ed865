"""Numbers in place of placeholders, the same for one picture and others for another.

So the prefix tree and the slots share what lies behind a picture by its content, and know nothing of pictures.
"""

from __future__ import annotations

from dataclasses import replace

from olive_ext.engine.requests import Request
from olive_ext.errors import RunError

FIRST_ID = 1 << 30
"""Larger than any token id."""

_LAST_ID = (1 << 31) - 1
"""The largest number that the slots' int32 holds."""


class MediaIds:
    """The numbers of each item's tokens, given when it is first met. A runner puts the placeholders back."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._next = FIRST_ID

    def put(self, request: Request) -> Request:
        """The request with its items' numbers in place of the placeholders."""
        if not request.media:
            return request
        tokens = list(request.tokens)
        for run in request.media:
            first = self._first.get(run.item.key)
            if first is None:
                first = self._first[run.item.key] = self._next
                self._next += run.item.num_tokens
                if self._next > _LAST_ID:
                    raise RunError("too many different pictures and sounds in one session: open the model again")
            tokens[run.start : run.stop] = range(first, first + run.item.num_tokens)
        return replace(request, tokens=tuple(tokens))
