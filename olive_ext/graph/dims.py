"""Arithmetic on lengths that may be symbols: a number, a name, "B*S" for a product, None for what is not known."""

from __future__ import annotations

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
    """Of one axis: what is not 1; None where two may differ, because one of them may be 1."""
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
    """What is left of all elements of `data` behind division by `dims`."""
    have, taken = factors(data), factors(dims)
    if have is None or taken is None:
        return None
    symbols = [part for part in have if isinstance(part, str)]
    for part in taken:
        if isinstance(part, str):
            if part not in symbols:
                return None
            symbols.remove(part)
    numbers = _times(have), _times(taken)
    if not numbers[1] or numbers[0] % numbers[1]:
        return None
    number = numbers[0] // numbers[1]
    if not symbols:
        return number
    return "*".join([*symbols, *([str(number)] if number != 1 else [])])


def _times(parts: Sequence[int | str]) -> int:
    product = 1
    for part in parts:
        product *= part if isinstance(part, int) else 1
    return product


def total(sizes: Sequence[Dim]) -> Dim:
    """The sum of numbers; None where one is a symbol."""
    numbers = [size for size in sizes if isinstance(size, int)]
    return sum(numbers) if len(numbers) == len(sizes) else None


def known_length(shape: Shape | None) -> Shape | None:
    """As many unknown numbers as a list of this shape has; None where that is not known."""
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int):
        return None
    return (None,) * shape[0]
