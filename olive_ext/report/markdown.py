"""Reports and chains as GitHub markdown. Knows where cells stand, not how numbers are formatted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from olive_ext.report.comparison import Comparison
from olive_ext.report.numbers import MARKDOWN, fact
from olive_ext.report.report import Report
from olive_ext.report.scores import ChainStep, chain_table, metric_table
from olive_ext.report.view import comparison_tables, heading, sentences


def to_markdown(report: Report) -> str:
    """The report as GitHub markdown: the metrics first, then what a comparison found, model, providers, engine and
    versions."""
    metrics = metric_table(report)
    heads = ("name", "device", "options", "origin")
    providers = [[fact(provider.get(head, ""), MARKDOWN) for head in heads] for provider in report.providers]
    parts = [
        f"# Evaluation of {_escape(metrics.title)}",
        f"Created {report.created}." if report.created else "",
        markdown_table(metrics.heads, metrics.rows),
        _comparison(report.comparison) if report.comparison is not None else "",
        _facts("Model", report.model),
        f"## Providers\n\n{markdown_table(heads, providers)}" if providers else "",
        _facts("Engine", report.engine),
        _facts("Versions", report.versions),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def chain_markdown(steps: Sequence[ChainStep]) -> str:
    """One row for each step of a chain of passes."""
    table = chain_table(steps)
    return f"# {table.title}\n\n{markdown_table(table.heads, table.rows)}\n"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """GitHub markdown of a table; cells may hold any text."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines)


def _comparison(comparison: Comparison) -> str:
    tables = [markdown_table(table.heads, table.rows) for table in comparison_tables(comparison)]
    return "\n\n".join([f"## {_escape(heading(comparison))}", *sentences(comparison), *tables])


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    cells = [(str(key), fact(value, MARKDOWN)) for key, value in facts.items()]
    return f"## {title}\n\n{markdown_table(('', ''), cells)}" if cells else ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
