"""Three files that only grow, and an index that records how much of them is valid. Knows no model and no request.

    records.bin    distributions, one `Form.dtype` each
    targets.bin    of each target of a request its record, its log-probability, and whether it is the argmax
    requests.bin   digests of requests, and the places of their targets
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

from olive_ext.errors import RecordsError, first_line
from olive_ext.records.cache_folder import open_own

WITHOUT_CHECKSUM, VERSION = 1, 2
INDEX = "index.json"
DAMAGED = "is_damaged"
Array = npt.NDArray[np.void]
_BLOCK_BYTES = 1 << 20


class GrowingFiles:
    """The files in `folder`, one for each of `dtypes` by name."""

    def __init__(
        self, folder: Path, dtypes: Mapping[str, np.dtype[np.void]], chunks: Sequence[Mapping[str, Any]]
    ) -> None:
        self._folder = folder
        self._dtypes = dict(dtypes)
        self.chunks = [dict(chunk) for chunk in chunks]
        self._checked: dict[str, set[int]] = {name: set() for name in dtypes}

    def count(self, name: str) -> int:
        """Number of items that have been written, also of damaged chunks: the number of the next one."""
        return sum(chunk["counts"][name] for chunk in self.chunks)

    def drop_damaged(self) -> list[Path]:
        """Compares every chunk's checksums, and marks those that are not what was written; the files with new ones."""
        found = []
        for name in self._dtypes:
            ends = self._ends(name) * self._dtypes[name].itemsize
            sound = [number for number, chunk in enumerate(self.chunks) if not chunk.get(DAMAGED)]
            with self._opened(name) as file:
                wrong = [chunk for chunk in sound if not self._is_sound(file, name, chunk, *ends[chunk : chunk + 2])]
            for chunk in wrong:
                self.chunks[chunk][DAMAGED] = True
            found += [self.path(name)] if wrong else []
        return found

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.bin"

    def read(self, name: str, numbers: npt.NDArray[np.int64] | None = None) -> Array:
        """Items by number, all valid ones by default. Raises `RecordsError` for a file that is not what was written.

        Read, not mapped: pages of a map that have been touched would count as this process's memory.
        """
        ends = self._ends(name)
        places = self._valid(ends) if numbers is None else np.asarray(numbers, np.int64)
        items = np.empty(len(places), self._dtypes[name])
        if not len(places):
            return items
        size = self._dtypes[name].itemsize
        with self._opened(name) as file:
            for chunk in np.unique(np.searchsorted(ends, places, "right") - 1).tolist():
                self._check(file, name, chunk, int(ends[chunk]) * size, int(ends[chunk + 1]) * size)
            begins = np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1)
            for begin, end in zip(begins, [*begins[1:], len(places)], strict=True):
                file.seek(int(places[begin]) * size)
                file.readinto(items[begin:end].view(np.uint8).data)
        return items

    def append(self, items: Mapping[str, Array]) -> None:
        """Writes a chunk behind what is valid; it counts once the index that names it is written."""
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
        """The number of the first item of each chunk, and behind them the number of the next one."""
        return np.cumsum([0, *(chunk["counts"][name] for chunk in self.chunks)])

    def _valid(self, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of the items of all chunks but the damaged ones."""
        parts = zip(ends, ends[1:], self.chunks, strict=False)
        sound = [np.arange(first, end) for first, end, chunk in parts if not chunk.get(DAMAGED)]
        return np.concatenate([np.empty(0, np.int64), *sound])

    def _opened(self, name: str) -> BufferedIOBase:
        """The file, or an empty one where there is none. Raises `RecordsError` where it cannot be read."""
        path = self.path(name)
        if not path.exists() and not path.is_symlink():
            return BytesIO()
        try:
            return open(path, "rb", opener=open_own)
        except OSError as error:
            raise RecordsError(f"'{path}' cannot be read: {first_line(error)}") from error

    def _check(self, file: BufferedIOBase, name: str, chunk: int, start: int, stop: int) -> None:
        """Compares a chunk's checksum once; `start` and `stop` are its bytes."""
        if chunk not in self._checked[name] and not self._is_sound(file, name, chunk, start, stop):
            path = self.path(name)
            raise RecordsError(f"'{path}' is damaged: part {chunk} is not what was written; {_remedy(path)}")
        self._checked[name].add(chunk)

    def _is_sound(self, file: BufferedIOBase, name: str, chunk: int, start: int, stop: int) -> bool:
        checksum, place = 0, file.seek(start)
        while content := file.read(min(_BLOCK_BYTES, stop - place)):
            checksum, place = zlib.crc32(content, checksum), place + len(content)
        return bool(place == stop and checksum == self.chunks[chunk]["checksums"][name])


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
    """Of all but itself, as it is read back."""
    content = {key: value for key, value in index.items() if key != "checksum"}
    return zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def _remedy(path: Path) -> str:
    return f"delete '{path.parent}' to record anew"
