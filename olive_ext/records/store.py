"""The records of one reference: written while it runs, read while a candidate runs. Knows no model.

Axes: T targets of a request, R records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from typing_extensions import Self

from olive_ext.errors import RecordsError, RunError
from olive_ext.records.files import INDEX, GrowingFiles, read_index, write_index
from olive_ext.records.form import Form
from olive_ext.records.index import REQUEST, Index, as_request, request_key

__all__ = ["Records", "Said", "request_key"]

TARGET = np.dtype([("record", "<i8"), ("logprob", "<f4"), ("is_greedy", "?")])
CHUNK_BYTES = 1 << 24
"""What is held in memory before it is written."""

CHUNK_REQUESTS = 1 << 14

Array = npt.NDArray[np.void]


@dataclass(frozen=True)
class Said:
    """What the reference said of a request: for each target its `record`, its `logprob` in nats and `is_greedy`."""

    record: npt.NDArray[np.int64]
    logprob: npt.NDArray[np.float32]
    is_greedy: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, targets: Array) -> Said:
        return cls(targets["record"].copy(), targets["logprob"].copy(), targets["is_greedy"].copy())


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
        self._index = Index(self._files.read("requests"))
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
        and `form`; what is there already is kept. Raises `RecordsError` where it is damaged, or another process writes.
        """
        folder = Path(root) / folder_name(form, facts)
        folder.mkdir(parents=True, exist_ok=True)
        index = read_index(folder) or {"chunks": []}
        return cls(folder, form, facts, index["chunks"], writes=True)

    @property
    def num_requests(self) -> int:
        return len(self._index) + len(self._fresh)

    @property
    def num_records(self) -> int:
        return self._files.count("records") + self._num_fresh

    def find(self, key: bytes) -> Said | None:
        """What was said of the request with this `request_key`."""
        if key in self._fresh:
            return Said.of(self._fresh[key])
        found = self._index.find(key)
        if found is None:
            return None
        first, count = found
        return Said.of(self._files.read("targets", np.arange(first, first + count)))

    def get(self, numbers: npt.NDArray[np.int64]) -> Array:
        """Records by number: `Form.dtype`[R]."""
        return self._files.read("records", numbers)

    def append(self, records_R: Array) -> npt.NDArray[np.int64]:
        """Keeps records; their numbers [R]."""
        first = self.num_records
        self._records.append(np.ascontiguousarray(records_R, self.form.dtype))
        self._num_fresh += len(records_R)
        return np.arange(first, first + len(records_R))

    def put(self, key: bytes, said: Said) -> None:
        """Keeps what was said of a request, unless it is there already; writes when enough has come together."""
        if key in self._fresh or self._index.find(key) is not None:
            return
        targets = np.empty(len(said.record), TARGET)
        targets["record"], targets["logprob"], targets["is_greedy"] = said.record, said.logprob, said.is_greedy
        self._fresh[key] = targets
        is_much = self._num_fresh * self.form.dtype.itemsize >= CHUNK_BYTES
        if is_much or len(self._fresh) >= CHUNK_REQUESTS:
            self.flush()

    def flush(self) -> None:
        """Writes what is held in memory. A request counts from then on, whatever happens to this process. Raises
        `RunError` where the disk does not take it."""
        if not self._fresh and not self._records:
            return
        first = self._files.count("targets")
        requests = []
        for key, targets in self._fresh.items():
            requests.append(as_request(key, first, len(targets)))
            first += len(targets)
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
        self._index = Index(self._files.read("requests"))

    def close(self) -> None:
        """Writes what is held in memory, and lets others write."""
        if self._lock is not None:
            self.flush()
            self._lock.release()

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts with stable names."""
        counts = {"requests": self.num_requests, "positions": self.num_records}
        return {"folder": str(self.folder), **self.form.describe(), **counts, "facts": self.facts}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


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
