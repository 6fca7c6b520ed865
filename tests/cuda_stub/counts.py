"""What the stub has counted of launches and copies since it was last asked."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """`wrong_copies`: those whose ends were not the kind of memory that their direction says. Bytes elsewhere."""

    wrong_copies: int
    launches: int
    copies_to_device: int
    bytes_to_device: int
    copies_to_host: int
    bytes_to_host: int
    largest_to_host: int


def counts() -> Counts:
    """Reads the counts and sets them to zero."""
    found = (ctypes.c_longlong * 7)()
    ctypes.CDLL(os.environ["OLIVE_EXT_CUDA_STUB"]).cuda_stub_counts(found)
    return Counts(*found)
