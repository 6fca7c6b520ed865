"""Reports for people: a table on the terminal, and markdown. Pure functions of a `Report`."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from olive_ext.report.compared_metrics import NAMES
from olive_ext.report.comparison import Comparison
from olive_ext.report.render_comparison import heading, lines, tables
from olive_ext.report.report import Report

if TYPE_CHECKING:
    from rich.console import Console

_HEADS = ("task", "metric", "filter", "value", "± stderr", "better", "n")


_NO_WRAP = 10_000
"""Characters; a file or a pipe has no width, and 80 would fold cells."""


def rows(report: Report) -> list[tuple[str, ...]]:
    """The table's cells, a row for each metric in the report's order, in the order of the heads.

    The numbers of a comparison have their own tables.
    """
    compared = NAMES if report.comparison is not None else ()
    return [
        (
            metric.task,
            metric.metric,
            metric.filter,
            number(metric.value),
            "" if metric.stderr is None else number(metric.stderr),
            "higher" if metric.higher_is_better else "lower",
            "" if metric.n is None else str(metric.n),
        )
        for metric in report.metrics
        if metric.metric not in compared
    ]


def number(value: float) -> str:
    """Four decimals; whole numbers without; very large and very small ones with four digits and an exponent."""
    if not math.isfinite(value) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{value:.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e7 else f"{value:.3e}"


def to_markdown(report: Report) -> str:
    """The report as GitHub markdown: the metrics first, then what a comparison found, model, providers, engine and
    versions."""
    parts = [f"# Evaluation of {_escape(_model_name(report))}", _created(report), markdown_table(_HEADS, rows(report))]
    parts += [_comparison(report.comparison)] if report.comparison is not None else []
    parts += [_facts("Model", report.model), _providers(report), _facts("Engine", report.engine)]
    parts += [_facts("Versions", report.versions)]
    return "\n\n".join(part for part in parts if part) + "\n"


def print_table(report: Report, file: IO[str] | None = None) -> None:
    """Prints the metrics and the facts a reader compares first; to stdout, or to `file`. Never cuts a cell."""
    console = print_rows(_model_name(report), _HEADS, rows(report), ("value", "± stderr", "n"), file)
    for found in tables(report.comparison) if report.comparison is not None else ():
        print_rows(found.title, found.heads, found.rows, found.heads[found.num_names :], file)
    for line in lines(report.comparison) if report.comparison is not None else ():
        console.print(line, markup=False)
    names = ", ".join(str(provider.get("name", provider)) for provider in report.providers)
    if names:
        console.print(f"providers: {names}", markup=False)
    seconds = report.engine.get("seconds")
    if isinstance(seconds, int | float):
        console.print(f"{_fed(report)}{seconds:.1f} s", markup=False)


def print_rows(
    title: str,
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    numbers: Container[str],
    file: IO[str] | None = None,
) -> Console:
    """Prints a table whose columns in `numbers` stand on the right; returns the console for more lines."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_NO_WRAP)
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head in numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(_plain_text(cell) for cell in row))
    console.print(table)
    return console


def _comparison(comparison: Comparison) -> str:
    parts = [f"## {_escape(heading(comparison))}", *lines(comparison)]
    return "\n\n".join([*parts, *(markdown_table(table.heads, table.rows) for table in tables(comparison))])


def _plain_text(cell: str) -> Any:
    from rich.text import Text

    return Text(cell)  # a plain string would be read as markup: "[a]" would vanish


def _fed(report: Report) -> str:
    fed, naive = report.engine.get("tokens_fed"), report.engine.get("tokens_naive")
    if not fed or not naive:
        return ""
    return f"{fed} tokens fed of {naive} in the requests, "


def _model_name(report: Report) -> str:
    return str(report.model.get("path", "model"))


def _created(report: Report) -> str:
    return f"Created {report.created}." if report.created else ""


def _providers(report: Report) -> str:
    heads = ("name", "device", "options", "origin")
    cells = [tuple(_inline(provider.get(head, "")) for head in heads) for provider in report.providers]
    return f"## Providers\n\n{markdown_table(heads, cells)}" if cells else ""


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    cells = [(str(key), _inline(value)) for key, value in facts.items()]
    return f"## {title}\n\n{markdown_table(('', ''), cells)}" if cells else ""


def _inline(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else ""
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_inline(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_inline(item) for item in value)
    return str(value)


def markdown_table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """GitHub markdown of a table; cells may hold any text."""
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
