"""Counts what requests need at least: each distinct prefix once, attention to what precedes it, rows of the head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from olive_ext.engine.requests import TokenArray, common_prefix


def count_tokens(inputs: Iterable[tuple[Sequence[int], int]]) -> dict[str, int]:
    """Of (fed tokens, how many of the last positions are read): `naive` and `distinct` tokens, `attended`: positions
    that the distinct ones attend to, themselves included; `rows`: distinct positions that are read."""
    naive = distinct = attended = rows = 0
    before: TokenArray = np.empty(0, np.int32)
    read: list[bool] = []
    for key, num_read in sorted((_key(tokens), number) for tokens, number in inputs):
        fed = np.frombuffer(key, np.int32)
        shared = common_prefix(before, fed)
        naive += len(fed)
        distinct += len(fed) - shared
        attended += sum(range(shared + 1, len(fed) + 1))
        read = read[:shared] + [False] * (len(fed) - shared)
        for position in range(len(fed) - num_read, len(fed)):
            rows += not read[position]
            read[position] = True
        before = fed
    return {"naive": naive, "distinct": distinct, "attended": attended, "rows": rows}


def _key(tokens: Sequence[int]) -> bytes:
    """Texts with a common prefix have neighbouring keys. A hundred thousand texts take memory, as Python's integers
    eight times as much."""
    return np.array(tokens, np.int64).astype(np.int32).tobytes()
