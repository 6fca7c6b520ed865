"""The results of an evaluation as plain data, and their forms: JSON, one table (terminal, markdown) and one HTML page.

The data are in `report`, `metrics`, `comparison` and `page`; `verdict`, `view` and `tables` turn them into
cells and sentences once; `plain_text` and `html` lay those out; `report_files` writes them. All of it is pure
but for the last. Other rooms import functions on reports from here, and data and names from `comparison`, `metrics`,
`numbers` and `page`. The room knows no model, no statistics and no evaluation framework.
"""

from olive_ext.report.html.render import to_html
from olive_ext.report.metrics import Metric
from olive_ext.report.page import model_name
from olive_ext.report.plain_text import (
    chain_markdown,
    literal,
    markdown_table,
    print_cells,
    print_lines,
    print_page,
    print_table,
    print_verdicts,
    to_markdown,
)
from olive_ext.report.report import PackedAnswers, Report, from_json, has_several_filters, to_json
from olive_ext.report.report_files import check_writable, page_of_report, write, write_chain, write_page, write_texts
from olive_ext.report.tables import Table, chain_steps, chain_table

__all__ = [
    "Metric",
    "PackedAnswers",
    "Report",
    "Table",
    "chain_markdown",
    "chain_steps",
    "chain_table",
    "check_writable",
    "from_json",
    "has_several_filters",
    "literal",
    "markdown_table",
    "model_name",
    "page_of_report",
    "print_cells",
    "print_lines",
    "print_page",
    "print_table",
    "print_verdicts",
    "to_html",
    "to_json",
    "to_markdown",
    "write",
    "write_chain",
    "write_page",
    "write_texts",
]
