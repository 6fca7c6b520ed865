"""Reports, pages and chains as tables on the terminal. Knows where cells stand, not how they are formatted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from olive_ext.errors import counted, printable
from olive_ext.report.page import Page
from olive_ext.report.report import Report
from olive_ext.report.scores import cost_rows, metric_table, phases_of, score_rows
from olive_ext.report.verdict import verdict
from olive_ext.report.view import SIGNS, Table, comparison_tables, difference_rows, divergence_rows, sentences

if TYPE_CHECKING:
    from rich.console import Console

_NO_WRAP = 10_000
"""Characters; a file or a pipe has no width, and 80 would fold cells."""


def print_cells(table: Table, file: IO[str] | None = None) -> Console:
    """Prints the table to stdout, or to `file`, and never cuts a cell; returns the console for more lines."""
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text  # a plain string would be read as markup: "[a]" would vanish

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = _NO_WRAP
    shown = rich_table.Table(title=Text(printable(table.title), style="table.title"), title_justify="left")
    for head in table.heads:
        shown.add_column(Text(printable(head)), justify="left" if head in table.texts else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    console.print(shown)
    return console


def print_table(report: Report, file: IO[str] | None = None) -> None:
    """Prints the metrics, the comparison and the facts that a reader compares first."""
    console = print_cells(metric_table(report), file)
    comparison = report.comparison
    for table in comparison_tables(comparison) if comparison is not None else ():
        print_cells(table, file)
    for line in sentences(comparison) if comparison is not None else ():
        console.print(printable(line), markup=False)
    names = ", ".join(str(provider.get("name", provider)) for provider in report.providers)
    if names:
        console.print(printable(f"providers: {names}"), markup=False)
    for line in _costs(report):
        console.print(printable(line), markup=False)


def _costs(report: Report) -> Iterator[str]:
    """Tokens and time, all of it by phase; how a Hugging Face model was run; what was not computed again."""
    reference = report.comparison.reference if report.comparison is not None else {}
    for name, facts in (("the model", report.model), ("the reference", reference)):
        if facts.get("export"):
            yield f"{name} {facts['export']}"
    if earlier := (report.model.get("journal") or {}).get("answers_known"):
        yield f"{counted(earlier, 'answer')} from an earlier run"
    fed, naive, seconds = (report.engine.get(name) for name in ("tokens_fed", "tokens_naive", "seconds"))
    if isinstance(seconds, int | float):
        tokens = f"{fed} tokens fed of {naive} in the requests, " if fed and naive else ""
        phases = ", ".join(f"{name} {spent:.1f}" for name, spent in phases_of(report.engine))
        yield f"{tokens}{seconds:.1f} s{f' ({phases})' if phases else ''}"


def print_page(page: Page, file: IO[str] | None = None) -> None:
    """Prints all models' scores, divergences and costs; a sign behind a score marks a clear paired difference."""
    heads = ("task", "metric", "n", *(column.name for column in page.columns))
    rows = [*_scores(page), *_divergences(page)]
    rows += [("", name, "", *cells) for name, cells in cost_rows(page.columns)]
    console = print_cells(Table(page.title, heads, rows, heads[:2]), file)
    if _signs(page):
        text = f"{SIGNS['loss']} loss, {SIGNS['gain']} gain: the paired 95 % interval excludes no difference"
        console.print(text, markup=False)
    for contrast in page.contrasts:
        note = f" ({contrast.note})" if contrast.note else ""
        line = f"{contrast.candidate}: {verdict(contrast.comparison).line}{note}"
        console.print(printable(line), markup=False)


def _scores(page: Page) -> list[Sequence[str]]:
    signs = _signs(page)
    rows: list[Sequence[str]] = []
    for row in score_rows(page.columns):
        metric = f"{row.metric}, {row.filter}" if row.filter else row.metric
        cells = []
        for cell, column in zip(row.cells, page.columns, strict=True):
            change = f"({cell.change})" if cell.change else ""
            parts = (str(cell.shown), change, signs.get((column.name, row.task, metric), ""))
            cells.append(" ".join(part for part in parts if part))
        rows.append((row.task, f"{metric} {'↑' if row.higher_is_better else '↓'}", row.documents, *cells))
    return rows


def _signs(page: Page) -> dict[tuple[str, str, str], str]:
    """The sign of each clear difference, by candidate, task and metric."""
    rows = difference_rows(page.contrasts)
    return {(row.candidate, row.task, row.metric): SIGNS[row.tone] for row in rows if row.tone != "unclear"}


def _divergences(page: Page) -> list[Sequence[str]]:
    """Mean KL of each candidate, a row for each task."""
    found = divergence_rows(page.contrasts)
    rows: list[Sequence[str]] = []
    for task in dict.fromkeys(row.task for row in found):
        means = {row.candidate: str(row.mean) for row in found if row.task == task}
        rows.append((task, "mean KL, nats ↓", "", *(means.get(column.name, "") for column in page.columns)))
    return rows
