"""Files of this package's caches: for this user only, and never through a link that somebody else may have put there;
and three that only grow, with an index that records how much of them is valid. Knows no model and no request.

    records.bin    distributions, one `Form.dtype` each
    targets.bin    of each target of a request its record, its log-probability, and whether it is the argmax
    requests.bin   digests of requests, and the numbers of their targets
    index.json     facts, form and the chunks that have been written, each with its lengths and checksums; its own

A chunk counts once the index names it, and the index is replaced as a whole: what an interruption cuts off is dropped.
A chunk that is found damaged keeps its place, so that the numbers in others stay right, and its items no longer count.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from olive_ext.errors import RecordsError, first_line

WITHOUT_CHECKSUM, VERSION = 1, 2
INDEX = "index.json"
DAMAGED = "is_damaged"
Array = npt.NDArray[np.void]


def cache_folder(name: str) -> Path:
    """The folder `name` of this package in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "olive_ext" / name


def make_own_folder(folder: Path) -> Path:
    """Makes the folder, readable by this user only. An existing folder stays as it is, with its owner's rights."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def refuse_shared(folder: Path) -> None:
    """Raises `OSError` for a folder that others may write into: its files could be theirs."""
    if os.name == "posix" and folder.stat().st_mode & 0o022:
        raise OSError("others may write into it (chmod go-w)")


def open_own(path: str | Path, flags: int) -> int:
    """Opens a cache's file, as `os.open`; new ones are this user's only. `OSError` for a symbolic link."""
    if Path(path).is_symlink():  # Windows has no such flag, and others call it "too many levels"
        raise OSError(f"'{path}' is a symbolic link, which no file of a cache is opened through: delete it")
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def locked(path: Path, busy: str) -> FileLock:
    """The lock at `path`, taken. Raises `RecordsError` with the message `busy` where another process has it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RecordsError(busy) from None
    return lock


class GrowingFiles:
    """The files in `folder`, one for each of `dtypes` by name."""

    def __init__(
        self, folder: Path, dtypes: Mapping[str, np.dtype[np.void]], chunks: Sequence[Mapping[str, Any]]
    ) -> None:
        self._folder = folder
        self._dtypes = dict(dtypes)
        self.chunks = [dict(chunk) for chunk in chunks]
        self._checked: set[tuple[str, int]] = set()

    def count(self, name: str) -> int:
        """Number of items that have been written, also of damaged chunks: the number of the next one."""
        return sum(chunk["counts"][name] for chunk in self.chunks)

    def drop_damaged(self) -> list[Path]:
        """Compares every chunk with its checksums, and marks those that are not what was written. Returns the files in
        which it found new ones."""
        damaged: dict[Path, None] = {}
        for name in self._dtypes:
            ends = self._ends(name)
            with self._opened(name) as file:
                for number, chunk in enumerate(self.chunks):
                    if not chunk.get(DAMAGED) and not self._is_sound(file, name, number, ends):
                        chunk[DAMAGED] = True
                        damaged[self.path(name)] = None
        return list(damaged)

    def path(self, name: str) -> Path:
        """The path of the file with this name."""
        return self._folder / f"{name}.bin"

    def read(self, name: str, numbers: npt.NDArray[np.int64] | None = None) -> Array:
        """The items [N] with these `numbers` [N], by default all valid ones. Raises `RecordsError` for a damaged file.

        They are read, not mapped: pages of a map that have been touched would count as this process's memory.
        """
        ends = self._ends(name)
        if numbers is None:
            parts = zip(ends, ends[1:], self.chunks, strict=False)
            valid = [np.arange(first, end) for first, end, chunk in parts if not chunk.get(DAMAGED)]
            numbers = np.concatenate([np.empty(0, np.int64), *valid])
        items = np.empty(len(numbers), self._dtypes[name])
        if not len(numbers):
            return items
        size = self._dtypes[name].itemsize
        with self._opened(name) as file:
            for number in np.unique(np.searchsorted(ends, numbers, "right") - 1).tolist():
                if (name, number) not in self._checked and not self._is_sound(file, name, number, ends):
                    path = self.path(name)
                    raise RecordsError(f"'{path}' is damaged: part {number} is not what was written; {_remedy(path)}")
                self._checked.add((name, number))
            begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
            for begin, end in zip(begins, [*begins[1:], len(numbers)], strict=True):
                file.seek(int(numbers[begin]) * size)
                file.readinto(items[begin:end].view(np.uint8).data)
        return items

    def append(self, items: Mapping[str, Array]) -> None:
        """Writes a chunk after what is valid. It counts once the index that names it is written."""
        chunk: dict[str, Any] = {"counts": {}, "checksums": {}}
        for name, array in items.items():
            content = array.tobytes()
            path = self.path(name)
            with open(path, "r+b" if path.exists() else "w+b", opener=open_own) as file:
                file.seek(self.count(name) * array.itemsize)
                file.truncate()
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            chunk["counts"][name] = len(array)
            chunk["checksums"][name] = zlib.crc32(content)
        self.chunks.append(chunk)

    def _ends(self, name: str) -> npt.NDArray[np.int64]:
        """The number of the first item of each chunk, and after them the number of the next one."""
        return np.cumsum([0, *(chunk["counts"][name] for chunk in self.chunks)])

    def _opened(self, name: str) -> BufferedIOBase:
        path = self.path(name)
        if not path.exists() and not path.is_symlink():
            return BytesIO()
        try:
            return open(path, "rb", opener=open_own)
        except OSError as error:
            raise RecordsError(f"'{path}' cannot be read: {first_line(error)}") from error

    def _is_sound(self, file: BufferedIOBase, name: str, number: int, ends: npt.NDArray[np.int64]) -> bool:
        start, stop = (ends[number : number + 2] * self._dtypes[name].itemsize).tolist()
        file.seek(start)
        content = file.read(stop - start)
        checksum: int = self.chunks[number]["checksums"][name]
        return len(content) == stop - start and zlib.crc32(content) == checksum


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index in `folder`; None where there is none. Raises `RecordsError` for one that cannot be read."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        with open(path, encoding="utf-8", opener=open_own) as file:
            index: dict[str, Any] = json.load(file)
        version, *_ = [index[key] for key in ("version", "facts", "form", "chunks")]
        if version == VERSION and index["checksum"] != _checksum(index):
            raise ValueError("checksum")
    except OSError as error:
        raise RecordsError(f"'{path}' cannot be read: {first_line(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordsError(f"'{path}' is damaged: {type(error).__name__}; {_remedy(path)}") from error
    if version not in (WITHOUT_CHECKSUM, VERSION):
        raise RecordsError(f"'{path}' has version {version!r} of the format; this is version {VERSION}")
    return index


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Replaces the index as a whole."""
    path, draft = folder / INDEX, folder / f"{INDEX}.new"
    with open(draft, "w", encoding="utf-8", opener=open_own) as file:
        content = {"version": VERSION, **index}
        json.dump({**content, "checksum": _checksum(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _checksum(index: Mapping[str, Any]) -> int:
    content = {key: value for key, value in index.items() if key != "checksum"}
    return zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def _remedy(path: Path) -> str:
    return f"delete '{path.parent}' to record anew"
