"""The folders of task files that a user names: apart from the loading of tasks, which imports lm-eval for seconds, so
that a missing one is told at once. Knows no task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from olive_ext.errors import TaskError


def task_folders(include_path: str | Sequence[str] | None) -> list[str]:
    """The folders of task files as a list; raises `TaskError` for one that does not exist."""
    folders = [include_path] if isinstance(include_path, str) else list(include_path or ())
    for folder in folders:
        if not Path(folder).is_dir():
            raise TaskError(f"'include_path' = {folder!r}: no such folder")
    return folders
