"""Whose turn it is: one call at a time uses the engine, from whatever thread.

Knows no engine. A call from another thread waits; a call from the thread whose own call is still open could wait
forever, so it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from olive_ext.errors import SessionError


class Turns:
    """Hands out turns until closed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._call = ""
        self._is_closed = False

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Waits for the turn of `call`. Raises `SessionError` on a closed session, or inside another call."""
        me = threading.get_ident()
        with self._condition:
            if self._owner == me and not self._is_closed:
                raise SessionError(f"{call} inside {self._call}: let that finish, or close its iterator, first")
            self._condition.wait_for(lambda: self._owner is None or self._is_closed)
            self.check_open()
            self._owner, self._call = me, call
        try:
            yield
        finally:
            with self._condition:
                self._owner = None
                self._condition.notify_all()

    def advance(self) -> None:
        """An iterator that holds the turn goes on, perhaps in another thread than the one that began it."""
        self.check_open()
        self._owner = threading.get_ident()

    def check_open(self) -> None:
        if self._is_closed:
            raise SessionError("the session is closed: open the model again")

    def close(self) -> bool:
        """No more turns; those who wait for one get the error. False where it was closed before."""
        with self._condition:
            was_open, self._is_closed = not self._is_closed, True
            self._condition.notify_all()
            return was_open
