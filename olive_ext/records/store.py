"""The records of one reference: written while it runs, read while a candidate runs. Knows no model.

A request is found by the digest of its content in sorted arrays: it takes 28 bytes, not a dictionary entry. Axes: T
targets of a request, R records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from typing_extensions import Self

from olive_ext.errors import RecordsError, RunError
from olive_ext.records.files import INDEX, GrowingFiles, read_index, write_index
from olive_ext.records.form import Form

TARGET = np.dtype([("record", "<i8"), ("logprob", "<f4"), ("is_greedy", "?")])
"""A target: the number of its record, its log-probability in nats, and whether it is the reference's argmax."""

REQUEST = np.dtype([("high", "<u8"), ("low", "<u8"), ("first", "<i8"), ("count", "<i4")])
"""A request: its digest in two halves, the number of its first target, and how many targets it has."""

CHUNK_BYTES, CHUNK_REQUESTS = 1 << 24, 1 << 14
"""Records, in bytes, and requests held in memory before they are written."""

Array = npt.NDArray[np.void]


def request_key(tokens: Sequence[int], num_targets: int, source: str = "") -> bytes:
    """Digest (16 bytes) of a request: its tokens, how many of them are targets, and the key of the encoder's source."""
    head = f"{num_targets} {source}\n".encode()
    return hashlib.blake2b(head + np.array(tokens, "<i8").tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class ScoredTargets:
    """The reference's scores of a request: `record`, `logprob` and `is_greedy` of each target, as in `TARGET`."""

    record: npt.NDArray[np.int64]
    logprob: npt.NDArray[np.float32]
    is_greedy: npt.NDArray[np.bool_]


class Records:
    """Records in `folder`. One process writes at a time; any number may read what was complete when they opened it."""

    def __init__(
        self, folder: Path, form: Form, facts: Mapping[str, Any], chunks: Sequence[Any], *, writes: bool
    ) -> None:
        self.folder = folder
        self.form = form
        self.facts = dict(facts)
        self._lock = _lock(folder) if writes else None
        dtypes = {"records": form.dtype, "targets": TARGET, "requests": REQUEST}
        self._files = GrowingFiles(folder, dtypes, chunks)
        self._requests = self._sorted_requests()
        self._fresh: dict[bytes, Array] = {}
        self._records: list[Array] = []
        self._num_fresh = 0

    @classmethod
    def read(cls, folder: str | Path) -> Records:
        """Opens for reading. Raises `RecordsError` where there are none, or they are damaged."""
        folder = Path(folder)
        index = read_index(folder)
        if index is None:
            raise RecordsError(f"'{folder}' holds no records of a reference: it has no '{INDEX}'")
        return cls(folder, Form(**index["form"]), index["facts"], index["chunks"], writes=False)

    @classmethod
    def write(cls, root: str | Path, form: Form, facts: Mapping[str, Any]) -> Records:
        """Opens for writing in the folder under `root` that belongs to `facts` (what decides the reference's numbers)
        and `form`, and keeps its records. Raises `RecordsError` where they are damaged or another process writes."""
        folder = Path(root) / folder_name(form, facts)
        folder.mkdir(parents=True, exist_ok=True)
        index = read_index(folder) or {"chunks": []}
        return cls(folder, form, facts, index["chunks"], writes=True)

    @property
    def num_requests(self) -> int:
        return len(self._requests) + len(self._fresh)

    @property
    def num_records(self) -> int:
        return self._files.count("records") + self._num_fresh

    def find(self, key: bytes) -> ScoredTargets | None:
        """The scores of the request with this `request_key`; None where there are none."""
        targets = self._fresh.get(key)
        if targets is None:
            found = self._request(key)
            if found is None:
                return None
            targets = self._files.read("targets", found["first"] + np.arange(found["count"]))
        return ScoredTargets(*(targets[name].copy() for name in ("record", "logprob", "is_greedy")))

    def get(self, numbers: npt.NDArray[np.int64]) -> Array:
        """Records by number: `Form.dtype`[R]."""
        return self._files.read("records", numbers)

    def append(self, records_R: Array) -> npt.NDArray[np.int64]:
        """Keeps records; returns their numbers [R]."""
        first = self.num_records
        self._records.append(np.ascontiguousarray(records_R, self.form.dtype))
        self._num_fresh += len(records_R)
        return np.arange(first, first + len(records_R))

    def put(self, key: bytes, scored: ScoredTargets) -> None:
        """Keeps a request's scores, unless they are there already; writes when enough has come together."""
        if key in self._fresh or self._request(key) is not None:
            return
        targets = np.empty(len(scored.record), TARGET)
        targets["record"], targets["logprob"], targets["is_greedy"] = scored.record, scored.logprob, scored.is_greedy
        self._fresh[key] = targets
        is_much = self._num_fresh * self.form.dtype.itemsize >= CHUNK_BYTES
        if is_much or len(self._fresh) >= CHUNK_REQUESTS:
            self.flush()

    def flush(self) -> None:
        """Writes what is held in memory. A request counts from then on, whatever happens to this process. Raises
        `RunError` where the disk refuses."""
        if not self._fresh and not self._records:
            return
        counts = [len(targets) for targets in self._fresh.values()]
        firsts = self._files.count("targets") + np.cumsum([0, *counts])[:-1]
        requests = [(*_halves(key), *place) for key, *place in zip(self._fresh, firsts, counts, strict=True)]
        chunk = {
            "records": np.concatenate([np.empty(0, self.form.dtype), *self._records]),
            "targets": np.concatenate([np.empty(0, TARGET), *self._fresh.values()]),
            "requests": np.array(requests, REQUEST),
        }
        try:
            self._files.append(chunk)
            write_index(self.folder, {"facts": self.facts, "form": asdict(self.form), "chunks": self._files.chunks})
        except OSError as error:
            raise RunError(f"the records in '{self.folder}' cannot be written: {error}") from error
        self._fresh, self._records, self._num_fresh = {}, [], 0
        self._requests = self._sorted_requests()

    def close(self) -> None:
        """Writes what is held in memory, and lets other processes write."""
        if self._lock is not None:
            self.flush()
            self._lock.release()

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts with stable names."""
        counts = {"requests": self.num_requests, "positions": self.num_records}
        return {"folder": str(self.folder), **self.form.describe(), **counts, "facts": self.facts}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sorted_requests(self) -> Array:
        return np.sort(self._files.read("requests"), order=("high", "low"))

    def _request(self, key: bytes) -> np.void | None:
        """The `REQUEST` on disk with this key."""
        high, low = _halves(key)
        highs = self._requests["high"]
        place = int(np.searchsorted(highs, np.uint64(high)))
        while place < len(highs) and highs[place] == high:
            if self._requests[place]["low"] == low:
                return cast(np.void, self._requests[place])
            place += 1
        return None


def folder_name(form: Form, facts: Mapping[str, Any]) -> str:
    """Digest (16 hex digits) of the form and of what decides the reference's numbers."""
    content = json.dumps({"form": asdict(form), "facts": facts}, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _lock(folder: Path) -> FileLock:
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RecordsError(f"another process is writing the records in '{folder}': wait for it to end") from None
    return lock


def _halves(key: bytes) -> tuple[int, int]:
    return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
