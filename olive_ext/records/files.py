"""Three files that only grow, and an index that says how much of them is valid. Knows no model and no request.

    records.bin    distributions, one `Form.dtype` each
    targets.bin    per target of a request: its record, its log-probability, whether it was the most probable token
    requests.bin   digests of requests, and where their targets are
    index.json     facts, form and the chunks that have been written, each with its lengths and checksums

A chunk counts once the index names it, and the index is replaced as a whole: what an interruption cuts off is dropped.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.errors import RecordsError

VERSION = 1
INDEX = "index.json"
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
        """Items that are valid."""
        return sum(chunk["counts"][name] for chunk in self.chunks)

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.bin"

    def read(self, name: str, numbers: npt.NDArray[np.int64] | None = None) -> Array:
        """Items by number, all of them by default. Raises `RecordsError` for a file that is not what was written.

        Read, not mapped: pages of a map that have been touched would count as this process's memory.
        """
        wanted = np.arange(self.count(name)) if numbers is None else np.asarray(numbers, np.int64)
        items = np.empty(len(wanted), self._dtypes[name])
        if not len(wanted):
            return items
        ends = np.cumsum([0, *(chunk["counts"][name] for chunk in self.chunks)])
        size = self._dtypes[name].itemsize
        with self._open(name) as file:
            for place in np.unique(np.searchsorted(ends, wanted, "right") - 1).tolist():
                self._check(file, name, place, int(ends[place]) * size, int(ends[place + 1]) * size)
            begins = np.flatnonzero(np.diff(wanted, prepend=wanted[0] - 2) != 1)
            for begin, end in zip(begins, [*begins[1:], len(wanted)], strict=True):
                file.seek(int(wanted[begin]) * size)
                file.readinto(items[begin:end].view(np.uint8).data)
        return items

    def append(self, items: Mapping[str, Array]) -> dict[str, Any]:
        """Writes a chunk behind what is valid; it counts once the index that names it is written."""
        chunk: dict[str, Any] = {"counts": {}, "checksums": {}}
        for name, array in items.items():
            content = array.tobytes()
            with self.path(name).open("r+b" if self.path(name).exists() else "w+b") as file:
                file.seek(self.count(name) * array.itemsize)
                file.truncate()
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            chunk["counts"][name] = len(array)
            chunk["checksums"][name] = zlib.crc32(content)
        self.chunks.append(chunk)
        return chunk

    def _open(self, name: str) -> BufferedReader:
        """Opens a file that holds as much as is valid."""
        path, needed = self.path(name), self.count(name) * self._dtypes[name].itemsize
        size = path.stat().st_size if path.exists() else 0
        if size < needed:
            raise RecordsError(f"'{path}' is damaged: {size} bytes, of {needed}; {_remedy(path)}")
        return path.open("rb")

    def _check(self, file: BufferedReader, name: str, place: int, start: int, stop: int) -> None:
        if place in self._checked[name]:
            return
        checksum = 0
        file.seek(start)
        while start < stop:
            block = file.read(min(_BLOCK_BYTES, stop - start))
            checksum = zlib.crc32(block, checksum)
            start += len(block)
        if checksum != self.chunks[place]["checksums"][name]:
            raise RecordsError(
                f"'{self.path(name)}' is damaged: part {place} is not what was written; {_remedy(self.path(name))}"
            )
        self._checked[name].add(place)


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index in `folder`; None where there is none. Raises `RecordsError` for one that cannot be read."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, _, _, _ = (index[key] for key in ("version", "facts", "form", "chunks"))
    except (ValueError, KeyError, TypeError) as error:
        raise RecordsError(f"'{path}' is damaged: {type(error).__name__}; {_remedy(path)}") from error
    if version != VERSION:
        raise RecordsError(f"'{path}' has version {version!r} of the format; this is version {VERSION}")
    return dict(index)


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Replaces the index as a whole."""
    path, draft = folder / INDEX, folder / f"{INDEX}.new"
    with draft.open("w", encoding="utf-8") as file:
        json.dump({"version": VERSION, **index}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _remedy(path: Path) -> str:
    return f"delete '{path.parent}' to record anew"
