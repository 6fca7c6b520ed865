"""The folder of what was compiled: a provider's own files in it, and what is deleted. Knows no graph and no session."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from olive_ext.records.cache_folder import make_own_folder

LIMIT_BYTES = 50 << 30
"""What is kept at most."""

NEW = ".new-"
_DAY_S = 86400

Stamps = Mapping[Path, tuple[int, int]]
"""Size and time of files, by path within a folder."""


class ProviderFiles:
    """A session's own copy of the files that a provider keeps in `place`: it may write them at any time, and a process
    that dies meanwhile leaves nothing in `place`. `pattern` is what one compiled thing is called."""

    def __init__(self, place: Path, pattern: str) -> None:
        self.place = place
        self._pattern = pattern
        self._scratch = tempfile.TemporaryDirectory(dir=place.parent, prefix=NEW, ignore_cleanup_errors=True)
        self.folder = Path(self._scratch.name)
        if place.is_dir():
            place.touch()
            shutil.copytree(place, self.folder, dirs_exist_ok=True)
        self._first = self._put = self._last = _stamps(self.folder)

    def new(self) -> Mapping[Path, int]:
        """Bytes of the compiled things that were written since."""
        self._look()
        changed = self._last.items() - self._first.items()
        return {path: stamp[0] for path, stamp in changed if path.match(self._pattern)}

    def num_kept(self) -> int:
        """Compiled things that were there, and still are as they were."""
        self._look()
        return sum(path.match(self._pattern) for path, _ in self._last.items() & self._first.items())

    def put_away(self) -> None:
        """Copies what was written to `place`; each file gets its name when it is complete."""
        self._look()
        for path, _ in self._last.items() - self._put.items():
            target = self.place / path
            make_own_folder(target.parent)
            part = target.with_name(f"{NEW}{os.getpid()}-{target.name}")
            shutil.copy2(self.folder / path, part)
            part.replace(target)
        self._put = self._last

    def close(self) -> None:
        """Deletes the copy; the counters stay."""
        self._look()
        self._scratch.cleanup()

    def _look(self) -> None:
        if self.folder.is_dir():
            self._last = _stamps(self.folder)


def keep_within(root: Path, limit: int = LIMIT_BYTES) -> None:
    """Deletes what was not used for longest until `limit` bytes are left, and what dead sessions left a day ago."""
    entries = sorted(_folders(root))
    sizes = {path: sum(size for size, _ in _stamps(path).values()) for _, path in entries}
    total, left = sum(sizes.values()), time.time() - _DAY_S
    for used, path in entries:
        is_new = path.name.startswith(NEW)
        if (is_new and used < left) or (not is_new and total > limit):
            with suppress(FileNotFoundError):  # another process deleted it
                delete(path)
            total -= sizes[path]


def delete(folder: Path) -> None:
    """Deletes a folder; nobody finds it half deleted under its name."""
    gone = folder.with_name(f"{NEW}{os.getpid()}-{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _folders(root: Path) -> Iterator[tuple[float, Path]]:
    """When each folder was used last."""
    for path in root.iterdir():
        with suppress(FileNotFoundError):
            if path.is_dir():
                yield path.stat().st_mtime, path


def _stamps(folder: Path) -> Stamps:
    return dict(_files(folder))


def _files(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                stat = path.stat()
                yield path.relative_to(folder), (stat.st_size, stat.st_mtime_ns)
