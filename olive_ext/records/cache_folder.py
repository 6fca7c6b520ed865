"""Where this package keeps what can be made again, and how: for this user only, and never through a link that somebody
else may have put there. Knows nothing of what is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder `name` of this package in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "olive_ext" / name


def make_own_folder(folder: Path) -> Path:
    """Makes the folder, readable by this user only; one that is there stays as it is, with its owner's rights."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def refuse_shared(folder: Path) -> None:
    """Raises `OSError` for a folder that others may write into, whose files could be theirs."""
    if os.name == "posix" and folder.stat().st_mode & 0o022:
        raise OSError("others may write into it (chmod go-w)")


def open_own(path: str | Path, flags: int) -> int:
    """Opens a file of a cache, as `os.open` or as an `opener` of `open`; new ones are this user's only. Raises
    `OSError` for a symbolic link."""
    if Path(path).is_symlink():  # Windows has no such flag, and others call it "too many levels"
        raise OSError(f"'{path}' is a symbolic link, which no file of a cache is opened through: delete it")
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
