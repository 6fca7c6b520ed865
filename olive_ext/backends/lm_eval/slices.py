"""Requests in slices, each encoded while the one before it is scored. Knows no model and no tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")

SLICE = 4096
"""Requests of a slice: enough to share prefixes in, few enough to hold their tokens."""


def encoded_slices(
    items: Sequence[Item],
    key: Callable[[Item], str],
    encode: Callable[[Sequence[Item]], Encoded],
    size: int = SLICE,
) -> Iterator[tuple[list[int], Encoded]]:
    """(places in `items`, what `encode` makes of them) for slices of `items` sorted by `key`.

    In sorted order neighbours share prefixes, so little sharing is lost between slices. `encode` runs in a thread of
    its own, one slice ahead; what it raises is raised here.
    """
    order = sorted(range(len(items)), key=lambda place: key(items[place]))
    slices = [order[start : start + size] for start in range(0, len(order), size)]
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as pool:
        ahead: deque[Future[Encoded]] = deque()
        for number, places in enumerate(slices):
            for following in slices[number + len(ahead) : number + 2]:
                ahead.append(pool.submit(encode, [items[place] for place in following]))
            yield places, ahead.popleft().result()
