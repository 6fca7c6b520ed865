"""A page of reports as one HTML file that needs nothing else: the only door to Jinja. Knows no model and no files.

The page opens with a lead for each candidate: the verdict, and the few numbers that a reader looks for first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olive_ext.errors import counted
from olive_ext.report import numbers
from olive_ext.report.comparison import ALL, Divergence
from olive_ext.report.html import facts
from olive_ext.report.html.pictures import forest, kl_pictures
from olive_ext.report.page import Column, Contrast, Page, page_of
from olive_ext.report.report import Report
from olive_ext.report.scores import cost_rows, score_rows
from olive_ext.report.verdict import Kind, verdict
from olive_ext.report.view import (
    SIGNS,
    WORDS,
    DifferenceRow,
    difference_rows,
    divergence_rows,
    overall_first,
    task_title,
)

_TEMPLATES = Path(__file__).with_name("templates")
MAX_FOREST_ROWS = 60
"""Differences in the picture; all are in the table."""

MAX_TASK_PICTURES = 12
"""Tasks with pictures of their own besides those of all tasks."""

TONES: dict[Kind, str] = {
    "cannot_tell": "loss",
    "loss": "loss",
    "claim_broken": "loss",
    "distant": "doubt",
    "too_few": "doubt",
    "claim_open": "doubt",
    "small_loss": "doubt",
    "gain": "gain",
    "no_loss_found": "fine",
    "no_difference": "unclear",
    "nothing_compared": "plain",
}
"""CSS classes, which are colours."""

Tile = tuple[str, str, str]
"""Name of a number, the number, and a note that is set smaller."""


@dataclass(frozen=True)
class Lead:
    """The verdict on one model at the head of the page; `tone` is the CSS class."""

    name: str
    against: str
    basis: str
    """How much was compared."""

    tone: str
    sentence: str
    tiles: tuple[Tile, ...]


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
    measured = [column for column in page.columns if cost_rows([column])]
    reports = {column.name: column.report for column in page.columns if column.report is not None}
    return {
        "page": page,
        "leads": [_lead(contrast, page.columns) for contrast in page.contrasts] or [_scores_only(page)],
        "scores": score_rows(page.columns),
        "differences": differences,
        "forests": _forests(differences, len(page.contrasts) > 1),
        "num_in_picture": min(MAX_FOREST_ROWS, sum(row.outcome.is_share for row in differences)),
        "tones": {tone: {"word": WORDS[tone], "sign": SIGNS[tone]} for tone in WORDS},
        "divergences": divergence_rows(page.contrasts),
        "pictures": _pictures(page),
        "flips": facts.flip_data(page.contrasts),
        "cost_names": [column.name for column in measured],
        "costs": cost_rows(measured),
        "tasks": facts.task_rows(list(reports.values())),
        "setup": facts.fact_tables(list(reports.values())),
        "commands": [(name, facts.command(report.config)) for name, report in reports.items()],
        "several": len(page.contrasts) > 1,
    }


def _lead(contrast: Contrast, columns: Sequence[Column]) -> Lead:
    found = verdict(contrast.comparison)
    sentence = re.sub(r"-(?=\d)(?<!\w-)", numbers.MINUS, f"{found.finding[:1].upper()}{found.finding[1:]}")
    own = (column for column in columns if column.name == contrast.candidate)
    tiles = [(_title(figure.name), figure.value, figure.note) for figure in found.figures]
    tiles += [tile for column in own for tile in _sizes(column)]
    return Lead(contrast.candidate, contrast.reference, _basis(contrast), TONES[found.kind], sentence, tuple(tiles))


def _title(name: str) -> str:
    """The name of a figure as one of a tile; a task's name at its beginning stays as it is."""
    return f"{name[:1].upper()}{name[1:]}" if name.partition(" ")[0].isalpha() else name


def _basis(contrast: Contrast) -> str:
    comparison = contrast.comparison
    documents = comparison.documents()
    parts = [f"{numbers.count(sum(documents.values()))} documents of {counted(len(documents), 'task')}"]
    overall = comparison.overall_divergence()
    if overall is not None:
        parts.append(f"{numbers.count(overall.num_positions)} token positions")
    return ", ".join([*parts, *([contrast.note] if contrast.note else [])])


def _sizes(column: Column) -> list[Tile]:
    return [("Size on disk", numbers.size(item.value), "") for item in column.metrics if item.task == "size_on_disk"]


def _scores_only(page: Page) -> Lead:
    tasks = dict.fromkeys(metric.task for column in page.columns for metric in column.metrics if metric.n is not None)
    measured = counted(len(tasks), "task") if tasks else "No task"
    models = f" on {len(page.columns)} models" if len(page.columns) > 1 else ""
    why = "without per-document logs of both nothing says which answers changed" if models else "without a reference"
    tiles = tuple(_sizes(page.columns[0])) if len(page.columns) == 1 else ()
    return Lead(page.columns[0].name, "", "Scores only", "plain", f"{measured}{models}, {why}", tiles)


def _forests(rows: Sequence[DifferenceRow], several: bool) -> list[tuple[str, str]]:
    """The forest plot for a wide page and for a phone, with the CSS class that shows it there."""
    shown = [row for row in rows if row.outcome.is_share][:MAX_FOREST_ROWS]
    widths = {"wide": 1056, "narrow": 360} if shown else {}
    return [(kind, forest(shown, f"forest-{kind}", width, several)) for kind, width in widths.items()]


def _pictures(page: Page) -> list[tuple[str, list[tuple[str, str]]]]:
    """The pictures for all tasks together and for each of the first few: pairs of a title and SVG."""
    found: dict[str, list[tuple[str, Divergence]]] = {}
    for contrast in page.contrasts:
        for divergence in overall_first(contrast.comparison.divergences):
            found.setdefault(divergence.task, []).append((contrast.candidate, divergence))
    tasks = list(found)[: MAX_TASK_PICTURES + (ALL in found)]
    return [(task_title(task), kl_pictures(found[task], f"kl{place}")) for place, task in enumerate(tasks)]
