"""A page of several reports as a table on the terminal: scores of all models, then what it cost and what is clear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from olive_ext.report.html.differences import SIGNS, Tone, difference_rows, divergence_rows
from olive_ext.report.html.scores import cost_rows, score_rows
from olive_ext.report.page import Page
from olive_ext.report.render import print_rows
from olive_ext.report.verdict import verdict

_SCORE_HEADS = ("task", "metric", "n")


def print_page(page: Page, file: IO[str] | None = None) -> None:
    """Prints the table to stdout, or to `file`; a sign behind a score says what the paired difference tells."""
    names = [column.name for column in page.columns]
    console = print_rows(page.title, (*_SCORE_HEADS, *names), _rows(page), ("n", *names), file)
    if any(row.tone != "unclear" for row in difference_rows(page.contrasts)):
        console.print(
            f"{SIGNS['loss']} loss, {SIGNS['gain']} gain: the paired 95 % interval excludes no difference", markup=False
        )
    for contrast in page.contrasts:
        note = f" ({contrast.note})" if contrast.note else ""
        console.print(f"{contrast.candidate}: {verdict(contrast.comparison).line}{note}", markup=False)


def _rows(page: Page) -> list[Sequence[str]]:
    signs = _signs(page)
    rows: list[Sequence[str]] = []
    for row in score_rows(page.columns):
        metric = f"{row.metric}, {row.filter}" if row.filter else row.metric
        cells = [
            " ".join(
                part
                for part in (
                    cell.value,
                    f"± {cell.error}" if cell.error else "",
                    f"({cell.change})" if cell.change else "",
                    signs.get((column.name, row.task, metric), ""),
                )
                if part
            )
            for cell, column in zip(row.cells, page.columns, strict=True)
        ]
        rows.append((row.task, f"{metric} {'↑' if row.direction == 'higher' else '↓'}", row.documents, *cells))
    rows += _divergences(page)
    rows += [("", name, "", *cells) for name, cells in cost_rows(page.columns)]
    return rows


def _signs(page: Page) -> dict[tuple[str, str, str], str]:
    clear: tuple[Tone, ...] = ("loss", "gain")
    return {
        (row.candidate, row.task, row.metric): SIGNS[row.tone]
        for row in difference_rows(page.contrasts)
        if row.tone in clear
    }


def _divergences(page: Page) -> list[Sequence[str]]:
    """Mean KL of each candidate, a row for each task."""
    found = divergence_rows(page.contrasts)
    rows: list[Sequence[str]] = []
    for task in dict.fromkeys(row.task for row in found):
        texts = {
            row.candidate: f"{row.mean} ± {row.stderr}" if row.stderr else row.mean for row in found if row.task == task
        }
        rows.append((task, "mean KL, nats ↓", "", *(texts.get(column.name, "") for column in page.columns)))
    return rows
