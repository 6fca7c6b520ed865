"""Reports and chains as GitHub markdown. Knows where cells stand, not how numbers are formatted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from olive_ext.errors import printable
from olive_ext.report.comparison import Comparison
from olive_ext.report.numbers import MARKDOWN, fact
from olive_ext.report.report import Report
from olive_ext.report.scores import ChainStep, chain_table, metric_table
from olive_ext.report.view import comparison_tables, heading, sentences

_MARKUP = re.compile(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", re.IGNORECASE)
"""What GitHub's markdown takes for markup within a line, addresses that become links by themselves included. Between
letters and digits `_` is none."""


def to_markdown(report: Report) -> str:
    """The report as GitHub markdown: the metrics first, then what a comparison found, model, providers, engine and
    versions."""
    metrics = metric_table(report)
    heads = ("name", "device", "options", "origin")
    providers = [[fact(provider.get(head, ""), MARKDOWN) for head in heads] for provider in report.providers]
    parts = [
        f"# Evaluation of {literal(metrics.title)}",
        f"Created {literal(report.created)}." if report.created else "",
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
    return f"# {literal(table.title)}\n\n{markdown_table(table.heads, table.rows)}\n"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """GitHub markdown of a table; cells may hold any text."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(literal, line))} |" for line in lines)


def _comparison(comparison: Comparison) -> str:
    tables = [markdown_table(table.heads, table.rows) for table in comparison_tables(comparison)]
    return "\n\n".join([f"## {literal(heading(comparison))}", *map(literal, sentences(comparison)), *tables])


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    cells = [(str(key), fact(value, MARKDOWN)) for key, value in facts.items()]
    return f"## {title}\n\n{markdown_table(('', ''), cells)}" if cells else ""


def literal(text: str) -> str:
    """Markdown of one line that shows exactly `text`: names and answers are written by others, who could put links,
    pictures and HTML into them. Control characters are replaced, as on a terminal."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(printable(text).split()))
