"""The loss map and the bill, each as one HTML file that needs nothing else, and with it as all of its files. The room's
only door to Jinja."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from olive_ext.remedy import bill as bills
from olive_ext.remedy import loss_map as maps
from olive_ext.remedy.bill import Bill, changes_table, points_table
from olive_ext.remedy.front_picture import picture_of
from olive_ext.remedy.loss_map import HEADS, Entry, LossMap, heat, interval, row
from olive_ext.report import numbers
from olive_ext.report.html import render
from olive_ext.report.report import plain, to_json
from olive_ext.report.report_files import write_texts

_TEMPLATES = Path(__file__).with_name("templates")
_LOOK = Path(render.__file__).with_name("templates")
"""Those of report.html, whose style sheet is shared."""

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
    return _rendered(
        "loss_map.html.j2",
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
    return _rendered(
        "bill.html.j2",
        bill=bill,
        tone=_TONES[bill.verdict],
        picture=picture_of(bill),
        changed=changes_table(bill),
        points=points_table(bill),
    )


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([_TEMPLATES, _LOOK]), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    text = environment.get_template(template).render(**values)
    return text.encode("utf-8", "replace").decode("utf-8")


def _shade(entry: Entry, largest: float) -> int:
    """Per cent, over three powers of ten below the largest loss: one hue, so that lightness alone tells."""
    if entry.kl <= 0 or largest <= 0:
        return 0
    return round(MOST_SHADE * max(0.0, 1 + math.log10(entry.kl / largest) / 3))
