"""Writes a file as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

from olive_ext.errors import RunError


def replace_text(path: Path, text: str) -> None:
    """Raises `RunError` where the disk refuses."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write '{path}': {error.strerror or error}") from error
