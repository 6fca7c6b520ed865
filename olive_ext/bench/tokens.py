"""Counts what requests need at least: each distinct prefix once, attention to what precedes it, rows of the head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def count_tokens(inputs: Iterable[tuple[Sequence[int], int]]) -> dict[str, int]:
    """Of (fed tokens, how many of the last positions are read): `naive` and `distinct` tokens, `attended`: positions
    that the distinct ones attend to, themselves included; `rows`: distinct positions that are read."""
    naive = distinct = attended = rows = 0
    before: Sequence[int] = ()
    read: list[bool] = []
    for fed, num_read in sorted((tuple(tokens), number) for tokens, number in inputs):
        shared = _shared(before, fed)
        naive += len(fed)
        distinct += len(fed) - shared
        attended += sum(range(shared + 1, len(fed) + 1))
        read = read[:shared] + [False] * (len(fed) - shared)
        for position in range(len(fed) - num_read, len(fed)):
            rows += not read[position]
            read[position] = True
        before = fed
    return {"naive": naive, "distinct": distinct, "attended": attended, "rows": rows}


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    most = min(len(first), len(second))
    return next((at for at in range(most) if first[at] != second[at]), most)
