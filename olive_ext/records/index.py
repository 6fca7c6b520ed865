"""Finds requests by the digest of their content, in arrays: a request takes 28 bytes, not a dictionary entry."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

REQUEST = np.dtype([("high", "<u8"), ("low", "<u8"), ("first", "<i8"), ("count", "<i4")])
"""A request's digest in two halves, its first target and how many it has."""

Requests = npt.NDArray[np.void]


def request_key(tokens: Sequence[int], num_targets: int, source: str = "") -> bytes:
    """Digest (16 bytes) of what is asked: tokens, how many of them are targets, and the key of what an encoder got."""
    head = f"{num_targets} {source}\n".encode()
    return hashlib.blake2b(head + np.array(tokens, "<i8").tobytes(), digest_size=16).digest()


def as_request(key: bytes, first: int, count: int) -> tuple[int, int, int, int]:
    """The values of one `REQUEST`."""
    return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"), first, count


class Index:
    """Requests, sorted by their digest."""

    def __init__(self, requests: Requests) -> None:
        self._requests = np.sort(requests, order=("high", "low"))

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, key: bytes) -> tuple[int, int] | None:
        """(first target, number of targets), or None."""
        high, low, _, _ = as_request(key, 0, 0)
        highs = self._requests["high"]
        place = int(np.searchsorted(highs, np.uint64(high)))
        while place < len(highs) and highs[place] == high:
            found = self._requests[place]
            if found["low"] == low:
                return int(found["first"]), int(found["count"])
            place += 1
        return None
