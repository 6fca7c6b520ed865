"""The loss map and the bill, each as one HTML file that needs nothing else, with the picture of a bill; and with it as
all of its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from olive_ext.plugins.diagnose.remedy import bill as bills
from olive_ext.plugins.diagnose.remedy import loss_map as maps
from olive_ext.plugins.diagnose.remedy.bill import Bill, changes_table, points_table
from olive_ext.plugins.diagnose.remedy.loss_map import HEADS, Entry, LossMap, heat, interval, row
from olive_ext.report import numbers
from olive_ext.report.html.render import filled
from olive_ext.report.report import plain, to_json
from olive_ext.report.report_files import write_texts

_TEMPLATES = Path(__file__).with_name("templates")
"""The page's templates, beside those of report.html, whose style sheet is shared."""

_TONES: dict[bills.Verdict, str] = {"kept": "fine", "not kept": "loss", "not decided": "doubt", "none": ""}
"""The style of a verdict."""

MOST_SHADE = 70
"""Per cent of the accent's colour in the darkest cell: text on it stays readable."""


def write_loss_map(loss_map: LossMap, folder: str | Path) -> tuple[Path, ...]:
    """Writes loss_map.json, loss_map.md and loss_map.html into `folder`, all or none. Raises `RunError`."""
    texts = {
        maps.FILE_NAME: loss_map.to_json(),
        maps.TABLE_NAME: maps.to_markdown(loss_map),
        maps.PAGE_NAME: to_html(loss_map),
    }
    paths = {Path(folder) / name: text for name, text in texts.items()}
    write_texts(paths, Path(folder), "the loss map")
    return tuple(paths)


def bill_texts(bill: Bill) -> dict[Path, str]:
    """The files beside a mended model, by their names."""
    return {
        Path(bills.FILE_NAME): to_json({**plain(bill), "verdict": bill.verdict}),
        Path(bills.TABLE_NAME): bills.to_markdown(bill),
        Path(bills.PAGE_NAME): bill_page(bill),
        Path(bills.SETTINGS_NAME): to_json(bill.olive),
    }


def to_html(loss_map: LossMap) -> str:
    """The page: the sentences, a heat map of layers by kinds, places in the texts, and all entries."""
    kinds, layers = heat(loss_map)
    largest = max((entry.kl for entry in loss_map.entries), default=0.0)
    return filled(
        "loss_map.html.j2",
        _TEMPLATES,
        map=loss_map,
        kinds=kinds,
        layers=layers,
        outside=[entry for entry in loss_map.entries if entry.layer is None] if layers else (),
        shade=lambda entry: _shade(entry, largest),
        interval=interval,
        nats=numbers.nats,
        count=numbers.count,
        heads=HEADS,
        rows=[row(entry, loss_map) for entry in loss_map.entries],
        places=[("By the tokens before a target", loss_map.by_position), ("By the target's kind", loss_map.by_class)],
    )


def bill_page(bill: Bill) -> str:
    """The page of a bill: the sentences, bytes against loss, and what changed."""
    return filled(
        "bill.html.j2",
        _TEMPLATES,
        bill=bill,
        tone=_TONES[bill.verdict],
        picture=picture_of(bill),
        changed=changes_table(bill),
        points=points_table(bill),
    )


def _shade(entry: Entry, largest: float) -> int:
    """Per cent, over three powers of ten below the largest loss: one hue, so that lightness alone shows it."""
    if entry.kl <= 0 or largest <= 0:
        return 0
    return round(MOST_SHADE * max(0.0, 1 + math.log10(entry.kl / largest) / 3))


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
