"""A page of reports as one HTML file that needs nothing else: the only door to Jinja. Knows no model and no files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from olive_ext.report.comparison import ALL, Bin, Divergence
from olive_ext.report.html import numbers as numbers
from olive_ext.report.html.command_line import command
from olive_ext.report.html.differences import (
    SIGNS,
    WORDS,
    Difference,
    difference_rows,
    divergence_rows,
    overall_first,
    task_title,
)
from olive_ext.report.html.flips import flip_data
from olive_ext.report.html.headline import leads
from olive_ext.report.html.scores import cost_rows, measured, score_rows
from olive_ext.report.html.setup import setup_tables, task_rows
from olive_ext.report.page import Page, page_of
from olive_ext.report.report import Report

_TEMPLATES = Path(__file__).with_name("templates")
MAX_FOREST_ROWS = 60
"""Differences in the picture; all are in the table."""

MAX_TASK_PICTURES = 12
"""Tasks with pictures of their own besides those of all tasks."""


def to_html(report: Report) -> str:
    """The page of one evaluation. Raises `ImportError` where jinja2 or matplotlib is missing."""
    return render(page_of(report))


def render(page: Page) -> str:
    """The page as HTML. Raises `ImportError` where jinja2 or matplotlib is missing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(count=numbers.count, moment=numbers.moment, breakable=_breakable)
    text = environment.get_template("page.html.j2").render(**_context(page))
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates


def _breakable(name: str) -> Any:
    """A task's or model's name that may be broken behind its joints only."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([_/.-])(?=\w)", r"\1<wbr>", str(escape(name))))


def _context(page: Page) -> dict[str, Any]:
    differences = difference_rows(page.contrasts)
    return {
        "page": page,
        "leads": leads(page),
        "scores": score_rows(page.columns),
        "differences": differences,
        "forests": _forests(differences, len(page.contrasts) > 1),
        "num_in_picture": min(MAX_FOREST_ROWS, sum(row.is_share for row in differences)),
        "tones": {tone: {"word": WORDS[tone], "sign": SIGNS[tone]} for tone in WORDS},
        "divergences": divergence_rows(page.contrasts),
        "pictures": _pictures(page),
        "flips": flip_data(page.contrasts),
        "cost_names": [column.name for column in measured(page.columns)],
        "costs": cost_rows(measured(page.columns)),
        "tasks": task_rows(page.columns),
        "setup": setup_tables(page.columns),
        "commands": [
            (column.name, command(column.report.config)) for column in page.columns if column.report is not None
        ],
        "several": len(page.contrasts) > 1,
    }


def _forests(rows: list[Difference], several: bool) -> list[tuple[str, Any]]:
    """The forest plot for a wide page and for a phone, with the CSS class that shows it there."""
    from markupsafe import Markup

    from olive_ext.report.html.pictures import forest

    shown = [row for row in rows if row.is_share][:MAX_FOREST_ROWS]
    if not shown:
        return []
    widths = {"wide": 1056, "narrow": 360}
    return [(kind, Markup(forest(shown, f"forest-{kind}", width, several))) for kind, width in widths.items()]


def _pictures(page: Page) -> list[tuple[str, list[Any]]]:
    """For all tasks, and for each of the first few, its pictures: pairs of a title and SVG."""
    found: dict[str, list[tuple[str, Divergence]]] = {}
    for contrast in page.contrasts:
        for divergence in overall_first(contrast.comparison.divergences):
            found.setdefault(divergence.task, []).append((contrast.candidate, divergence))
    tasks = list(found)[: MAX_TASK_PICTURES + (ALL in found)]
    return [(task_title(task), _pictures_of(found[task], f"kl{place}")) for place, task in enumerate(tasks)]


def _pictures_of(found: list[tuple[str, Divergence]], name: str) -> list[Any]:
    from markupsafe import Markup

    from olive_ext.report.html import pictures

    kinds = (
        ("histogram", "How far apart", pictures.histogram),
        ("by_position", "Where in the text", pictures.by_position),
        ("by_class", "On which tokens", pictures.by_class),
    )
    made = []
    for kind, caption, draw in kinds:
        series: list[tuple[str, tuple[Bin, ...]]] = [(who, getattr(item, kind)) for who, item in found]
        series = [item for item in series if item[1]][: pictures.MAX_SERIES]
        if series:
            made.append((caption, Markup(draw(series, f"{name}-{kind}"))))
    return made
