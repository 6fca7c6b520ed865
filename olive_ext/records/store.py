"""The records of one reference: written while it runs, read while a candidate runs. Knows no model.

`Form` decides how much of a distribution a record keeps. A request is found by the digest of its content in sorted
arrays: it takes 28 bytes, not a dictionary entry. Axes: T targets of a request, R records, V vocabulary, N tokens of a
record.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.errors import ConfigError, RecordsError, RunError
from olive_ext.records.files import INDEX, GrowingFiles, locked, make_own_folder, read_index, write_index

logger = logging.getLogger(__name__)

WHOLE_VOCABULARY = 2048
"""Up to this many tokens a record holds all of them, and what is computed from it is exact."""

TOP, DRAWN, LEAST = 64, 32, 16
"""The default numbers of most probable and of drawn tokens in a large vocabulary, and the smallest defaults."""

SHARE = 0.02
"""The part of a row's fp32 logits that a record may take, where `LEAST` allows it."""

_TOKEN_BYTES = 8
"""An id and a log-probability, four bytes each."""

TARGET = np.dtype([("record", "<i8"), ("logprob", "<f4"), ("is_greedy", "?")])
"""A target: the number of its record, its log-probability in nats, and whether it is the reference's argmax."""

REQUEST = np.dtype([("key", "S16"), ("first", "<i8"), ("count", "<i4")])
"""A request: its digest, the number of its first target, and how many targets it has."""

CHUNK_BYTES, CHUNK_REQUESTS = 1 << 24, 1 << 14
"""The bytes of records, and the requests, that are held in memory before they are written."""

Array = npt.NDArray[np.void]


@dataclass(frozen=True)
class Form:
    """Content of a record: all `vocab_size` logits where `top` is 0; else the `top` most probable tokens and `drawn`
    tokens drawn from the others, with their log-probabilities, and the probability of all others together.

    From the whole row KL is exact up to float32 (2e-6 nats). From a short record it is estimated without bias, with a
    standard error that is computed for every position; over many positions the errors average out.
    """

    vocab_size: int
    top: int
    drawn: int
    seed: int = 0

    @classmethod
    def choose(cls, vocab_size: int, top: int | None = None, drawn: int | None = None, seed: int = 0) -> Form:
        """The form for a vocabulary. By default 64 + 32 tokens, fewer where these would take more than 2 % of the
        logits (below 10,000 tokens), never fewer than 16 + 16. A vocabulary of at most 2048 tokens is
        kept whole, and so is a vocabulary if more than half of it would be kept."""
        for name, value, least in (("top", top, 1), ("drawn", drawn, 2)):
            if value is not None and value < least:
                raise ConfigError(f"a number of at least {least}", name, value)
        fitting = int((SHARE * 4 * vocab_size - 4) / _TOKEN_BYTES)
        top = top or min(TOP, max(LEAST, fitting * TOP // (TOP + DRAWN)))
        drawn = drawn or min(DRAWN, max(LEAST, fitting * DRAWN // (TOP + DRAWN)))
        if vocab_size <= WHOLE_VOCABULARY or top + drawn > vocab_size / 2:
            return cls(vocab_size, 0, 0, seed)
        return cls(vocab_size, top, drawn, seed)

    @property
    def is_whole(self) -> bool:
        """Whether a record is the whole row of logits."""
        return self.top == 0

    @property
    def dtype(self) -> np.dtype[np.void]:
        """One record: `ids`[N], the most probable first, `logprobs`[N] in nats, and `tail`, the probability of all but
        the most probable; or `logits`[V], less their largest."""
        if self.is_whole:
            return np.dtype([("logits", "<f4", (self.vocab_size,))])
        size = (self.top + self.drawn,)
        return np.dtype([("ids", "<i4", size), ("logprobs", "<f4", size), ("tail", "<f4")])

    def describe(self) -> dict[str, object]:
        """JSON-ready facts with stable names."""
        return {
            "vocab_size": self.vocab_size,
            "top": self.top,
            "drawn": self.drawn,
            "is_exact": self.is_whole,
            "bytes_per_position": self.dtype.itemsize,
            "share_of_logits": round(self.dtype.itemsize / (4 * self.vocab_size), 5),
        }


def request_key(tokens: npt.ArrayLike, num_targets: int, source: str = "") -> bytes:
    """Digest (16 bytes) of a request: its tokens, how many of them are targets, and the key of the encoder's source."""
    head = f"{num_targets} {source}\n".encode()
    return hashlib.blake2b(head + np.array(tokens, "<i8").tobytes(), digest_size=16).digest()


def scored_targets(record: npt.ArrayLike, logprob: npt.ArrayLike, is_greedy: npt.ArrayLike) -> Array:
    """The reference's scores of a request: `TARGET`[T] from arrays [T]."""
    return np.rec.fromarrays([record, logprob, is_greedy], TARGET)


class Records:
    """Records in `folder`. One process writes at a time; any number may read what was complete when they opened it."""

    def __init__(
        self, folder: Path, form: Form, facts: Mapping[str, Any], chunks: Sequence[Any], *, writes: bool
    ) -> None:
        self.folder = folder
        self.form = form
        self.facts = dict(facts)
        busy = f"another process is writing the records in '{folder}': wait for it to end"
        self._lock = locked(folder / "lock", busy) if writes else None
        dtypes = {"records": form.dtype, "targets": TARGET, "requests": REQUEST}
        self._files = GrowingFiles(folder, dtypes, chunks)
        if writes and (damaged := self._files.drop_damaged()):
            num_requests = len(self._files.read("requests"))
            text = "%s: damaged parts are recorded again; the %d requests in the others are used"
            logger.warning(text, ", ".join(f"'{path}'" for path in damaged), num_requests)
            self._write_index()
        self._requests = np.sort(self._files.read("requests"), order="key")
        self._fresh: dict[bytes, Array] = {}
        self._records: list[Array] = []
        self._num_fresh = 0

    @classmethod
    def read(cls, folder: str | Path) -> Records:
        """Opens for reading. Raises `RecordsError` where there are none, or they are damaged."""
        folder = Path(folder)
        index = read_index(folder)
        if index is None:
            raise RecordsError(f"'{folder}' holds no records of a reference: it has no '{INDEX}'", code="not_found")
        return cls(folder, Form(**index["form"]), index["facts"], index["chunks"], writes=False)

    @classmethod
    def write(cls, root: str | Path, form: Form, facts: Mapping[str, Any]) -> Records:
        """Opens for writing in the folder under `root` that belongs to `facts` (what decides the reference's numbers)
        and `form`, and keeps its records. Raises `RecordsError` where they are damaged, the folder cannot
        be written, or another process writes."""
        decisive = json.dumps({"form": asdict(form), "facts": facts}, sort_keys=True, default=str)
        folder = Path(root) / hashlib.sha256(decisive.encode()).hexdigest()[:16]
        try:
            make_own_folder(folder)
            index = read_index(folder) or {"chunks": []}
            return cls(folder, form, facts, index["chunks"], writes=True)
        except OSError as error:
            raise RecordsError(
                f"cannot write records in '{folder}': {error}; give another 'reference.records_dir'", code="no_access"
            ) from error

    @property
    def num_requests(self) -> int:
        """The number of requests that are recorded, with those in memory."""
        return len(self._requests) + len(self._fresh)

    @property
    def num_records(self) -> int:
        """The number of positions that are recorded, with those in memory: the number of the next one."""
        return self._files.count("records") + self._num_fresh

    def find(self, key: bytes) -> Array | None:
        """The scores, `TARGET`[T], of the request with this `request_key`; None where there are none."""
        if key in self._fresh:
            return self._fresh[key]
        for request in self._requests_of(key):
            return self._files.read("targets", request["first"] + np.arange(request["count"]))
        return None

    def get(self, numbers: npt.NDArray[np.int64]) -> Array:
        """Records by number: `Form.dtype`[R]."""
        return self._files.read("records", numbers)

    def append(self, records_R: Array) -> npt.NDArray[np.int64]:
        """Keeps records; returns their numbers [R]."""
        first = self.num_records
        self._records.append(np.ascontiguousarray(records_R, self.form.dtype))
        self._num_fresh += len(records_R)
        return np.arange(first, first + len(records_R))

    def put(self, key: bytes, targets: Array) -> None:
        """Keeps a request's scores (`scored_targets`) unless they are there already; writes when enough are held."""
        if key in self._fresh or len(self._requests_of(key)):
            return
        self._fresh[key] = targets
        is_much = self._num_fresh * self.form.dtype.itemsize >= CHUNK_BYTES
        if is_much or len(self._fresh) >= CHUNK_REQUESTS:
            self.flush()

    def flush(self) -> None:
        """Writes what is held in memory; it counts from then on. Raises `RunError` where the disk refuses."""
        if not self._fresh and not self._records:
            return
        counts = [len(targets) for targets in self._fresh.values()]
        firsts = self._files.count("targets") + np.cumsum([0, *counts])[:-1]
        requests = [*zip(self._fresh, firsts, counts, strict=True)]
        chunk = {
            "records": np.concatenate([np.empty(0, self.form.dtype), *self._records]),
            "targets": np.concatenate([np.empty(0, TARGET), *self._fresh.values()]),
            "requests": np.array(requests, REQUEST),
        }
        try:
            self._files.append(chunk)
            self._write_index()
        except OSError as error:
            raise RunError(f"the records in '{self.folder}' cannot be written: {error}", code="no_access") from error
        self._fresh, self._records, self._num_fresh = {}, [], 0
        self._requests = np.sort(self._files.read("requests"), order="key")

    def close(self) -> None:
        """Writes what is held in memory, and lets other processes write."""
        if self._lock is not None:
            try:
                self.flush()
            finally:
                self._lock.release()

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts with stable names."""
        counts = {"requests": self.num_requests, "positions": self.num_records}
        return {"folder": str(self.folder), **self.form.describe(), **counts, "facts": self.facts}

    def _write_index(self) -> None:
        write_index(self.folder, {"facts": self.facts, "form": asdict(self.form), "chunks": self._files.chunks})

    def _requests_of(self, key: bytes) -> Array:
        found: Array = self._requests[np.searchsorted(self._requests["key"], key) :][:1]
        return found if key in found["key"] else found[:0]
