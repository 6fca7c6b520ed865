"""The picture of a bill, as coordinates: bytes to the right, loss upwards by powers of ten. Knows no page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from olive_ext.remedy.bill import Bill
from olive_ext.report import numbers

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 340, 70, 28, 24

LINE = 14
"""Height of a name."""


@dataclass(frozen=True)
class Picture:
    """Places in the picture, in its own units, y downwards."""

    width: int
    height: int
    left: int
    ticks: tuple[tuple[float, str], ...]
    sizes: tuple[tuple[float, str], ...]
    front: str
    squares: tuple[tuple[float, float, float, str], ...]
    """Right, down, where the name's line lies, and the name."""

    chosen: tuple[float, float]
    cross: str
    bound: float | None


def picture_of(bill: Bill) -> Picture:
    """Losses of nothing lie at the bottom, with the smallest power of ten."""
    points = [*bill.front, *bill.uniform, bill.unchanged, bill.chosen]
    held = bill.chosen_loss.held_out
    measured = (held.mean, held.high, bill.bound or 0.0)
    losses = [one.kl for one in points if one.kl > 0] + [one for one in measured if 0 < one < math.inf]
    least, most = _decades(losses)
    small, large = min(one.bytes for one in points), max(one.bytes for one in points)

    def x(size: float) -> float:
        return round(LEFT + 20 + (WIDTH - LEFT - 60) * (size - small) / max(large - small, 1), 1)

    def y(loss: float) -> float:
        share = (math.log10(max(loss, 10.0**least)) - least) / (most - least)
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(1.0, share), 1)

    at = x(bill.chosen.bytes)
    low, middle, high = y(held.low), y(held.mean), y(held.high)
    return Picture(
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        ticks=tuple((y(10.0**power), numbers.nats(10.0**power)) for power in range(least, most + 1)),
        sizes=tuple((x(size), numbers.size(size)) for size in (small, (small + large) / 2, large)),
        front=" ".join(f"{x(one.bytes)},{y(one.kl)}" for one in bill.front),
        squares=tuple(_apart([(x(one.bytes), y(one.kl), one.name) for one in (bill.unchanged, *bill.uniform)])),
        chosen=(at, y(bill.chosen.kl)),
        cross=f"M{at - 5} {low}H{at + 5}M{at} {low}V{high}M{at - 5} {high}H{at + 5}M{at - 10} {middle}H{at + 10}",
        bound=None if bill.bound is None else y(bill.bound),
    )


def _apart(squares: Iterable[tuple[float, float, str]]) -> Iterator[tuple[float, float, float, str]]:
    """The squares with the lines of their names, none of which lies on another's: from below, each above the last."""
    free = math.inf
    for x, y, name in sorted(squares, key=lambda square: -square[1]):
        line = min(y - LINE * 0.7, free)
        free = line - LINE
        yield x, y, line, name


def _decades(losses: list[float]) -> tuple[int, int]:
    """Powers of ten around all losses, at most eight."""
    if not losses:
        return -1, 0
    most = math.ceil(math.log10(max(losses)) + 1e-9)
    return max(most - 8, min(most - 1, math.floor(math.log10(min(losses))))), most
