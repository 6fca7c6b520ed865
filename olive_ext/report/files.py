"""Reports on disk: report.json and report.md, each replaced as a whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from olive_ext.errors import ConfigError, RunError
from olive_ext.report.render import to_markdown
from olive_ext.report.report import Report, to_json


def write(report: Report, directory: str | Path) -> tuple[Path, Path]:
    """Writes both files into `directory`, which is made where missing, and returns their paths.

    Each is written beside its place and renamed, so that a reader never sees half a file. Raises `RunError` where the
    disk refuses; the files of an earlier report then stay as they were.
    """
    directory = Path(directory)
    json_path, markdown_path = directory / "report.json", directory / "report.md"
    write_texts({json_path: to_json(report), markdown_path: to_markdown(report)}, directory)
    return json_path, markdown_path


def write_texts(texts: Mapping[Path, str], directory: Path) -> None:
    """Writes files into `directory` as `write` does."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace_all(texts)
    except OSError as error:
        raise RunError(f"cannot write the report to '{directory}': {error.strerror or error}") from error


def check_writable(directory: str | Path) -> None:
    """Raises `ConfigError` where `write` could not make or fill `directory`; changes nothing.

    To be asked before hours of evaluation, not after.
    """
    path = Path(directory).absolute()
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir():
        raise ConfigError(f"'output_dir' = '{directory}': '{nearest}' is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"'output_dir' = '{directory}': no permission to write in '{nearest}'")


def _replace_all(texts: Mapping[Path, str]) -> None:
    """Writes every file in full before the first is renamed."""
    temporary = {path: path.with_name(f".{path.name}.{uuid.uuid4().hex}") for path in texts}
    try:
        for path, text in texts.items():
            with temporary[path].open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for path, written in temporary.items():
            written.replace(path)
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)
