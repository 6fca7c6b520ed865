"""Arithmetic on lengths of axes that may be symbols. Knows no graph.

A length is a number, a name, "B*S" for a product, or None where it is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Dim = int | str | None
Shape = tuple[Dim, ...]


def broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape of an element-wise operator's result; None where one of `shapes` is not known."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or not known:
        return None
    rank = max(len(shape) for shape in known)
    aligned = [(1,) * (rank - len(shape)) + shape for shape in known]
    return tuple(_common([shape[axis] for shape in aligned]) for axis in range(rank))


def _common(sizes: Sequence[Dim]) -> Dim:
    """The broadcast length of one axis; None where two of `sizes` may differ, because one of them may be 1."""
    others = set(sizes) - {1}
    return 1 if not others else others.pop() if len(others) == 1 else None


def factors(dims: Sequence[Dim]) -> tuple[int | str, ...] | None:
    """The lengths that are multiplied, in their order and without ones; None where one is not known."""
    parts: list[int | str] = []
    for dim in dims:
        if dim is None:
            return None
        parts += [int(part) if part.isdigit() else part for part in str(dim).split("*")]
    return tuple(part for part in parts if part != 1)


def rest(data: Sequence[Dim], dims: Sequence[Dim]) -> Dim:
    """The number of elements of shape `data` divided by that of `dims`; None where it is not known."""
    have, taken = factors(data), factors(dims)
    if have is None or taken is None:
        return None
    symbols = [part for part in have if isinstance(part, str)]
    for part in taken:
        if isinstance(part, str):
            if part not in symbols:
                return None
            symbols.remove(part)
    dividend, divisor = (math.prod(part for part in parts if isinstance(part, int)) for parts in (have, taken))
    if not divisor or dividend % divisor:
        return None
    number = dividend // divisor
    return "*".join([*symbols, *([str(number)] if number != 1 else [])]) if symbols else number


def known_length(shape: Shape | None) -> Shape | None:
    """A list of unknown numbers, one for each element of a value of one axis; None where its length is not known."""
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int):
        return None
    return (None,) * shape[0]
