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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.errors import RecordsError

VERSION = 1
INDEX = "index.json"
Array = npt.NDArray[np.void]


class GrowingFiles:
    """The files in `folder`, one for each of `dtypes` by name."""

    def __init__(
        self, folder: Path, dtypes: Mapping[str, np.dtype[np.void]], chunks: Sequence[Mapping[str, Any]]
    ) -> None:
        self._folder = folder
        self._dtypes = dict(dtypes)
        self.chunks = [dict(chunk) for chunk in chunks]
        self._checked: dict[str, set[int]] = {name: set() for name in dtypes}
        self._maps: dict[str, Array] = {}

    def count(self, name: str) -> int:
        """Items that are valid."""
        return sum(chunk["counts"][name] for chunk in self.chunks)

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.bin"

    def read(self, name: str, numbers: npt.NDArray[np.int64] | None = None) -> Array:
        """Items by number, all of them by default. Raises `RecordsError` for a file that is not what was written."""
        ends = np.cumsum([0, *(chunk["counts"][name] for chunk in self.chunks)])
        touched = range(len(self.chunks)) if numbers is None else np.unique(np.searchsorted(ends, numbers, "right") - 1)
        items = self._map(name)
        for place in touched:
            self._check(name, int(place), items[ends[place] : ends[place + 1]])
        return np.array(items if numbers is None else items[numbers])

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
            self._maps.pop(name, None)
        self.chunks.append(chunk)
        return chunk

    def _map(self, name: str) -> Array:
        if name not in self._maps:
            path, dtype, count = self.path(name), self._dtypes[name], self.count(name)
            size = path.stat().st_size if path.exists() else 0
            if size < count * dtype.itemsize:
                raise RecordsError(f"'{path}' is damaged: {size} bytes, of {count * dtype.itemsize}; {_remedy(path)}")
            self._maps[name] = np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)
        return self._maps[name]

    def _check(self, name: str, place: int, items: Array) -> None:
        if place in self._checked[name]:
            return
        if zlib.crc32(np.ascontiguousarray(items).view(np.uint8).data) != self.chunks[place]["checksums"][name]:
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
