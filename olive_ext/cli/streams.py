"""The standard streams of the command: there where they were closed, and writable on any terminal."""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from pathlib import Path

_PLAIN = {"±": "+-", "↑": "^", "↓": "v", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{MULTIPLICATION SIGN}": "x"}
_ERRORS = "olive_ext_plain"


def open_streams() -> None:
    """Opens to nothing what was closed: the next file that is opened would take its number, and what libraries print.
    Letters that the terminal does not have are replaced, not an error behind hours of work."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - while the process lasts
    codecs.register_error(_ERRORS, _replaced)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ERRORS)
    if isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding
        messages = _Messages(sys.stderr.detach(), encoding, _ERRORS, line_buffering=True)
        for name in ("stderr", "__stderr__"):
            setattr(sys, name, messages)


class _Messages(io.TextIOWrapper):
    """stderr, whose reader may go: the command goes on without it."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """The letters that an encoding lacks, as others that every one has."""
    assert isinstance(error, UnicodeEncodeError)
    found = []
    for letter in error.object[error.start : error.end]:
        plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
        found.append(_PLAIN.get(letter) or plain or "?")
    return "".join(found), error.end
