"""What an evaluation found, as plain data, and its forms: JSON, a table on the terminal, markdown, one HTML page.

The data are in `report`, `metrics`, `comparison` and `page`; `verdict`, `view` and `scores` turn them into cells and
sentences once; `terminal`, `markdown` and `html` lay those out; `report_files` writes them. All of it is pure but for
the last. Other rooms import functions on reports from here, and data and names from `comparison`, `metrics`, `numbers`
and `page`. The room knows no model, no statistics and no evaluation framework.
"""

from olive_ext.report.html.render import to_html
from olive_ext.report.markdown import chain_markdown, literal, markdown_table, to_markdown
from olive_ext.report.metrics import Metric
from olive_ext.report.page import model_name
from olive_ext.report.report import Report, from_json, has_several_filters, to_json
from olive_ext.report.report_files import check_writable, write, write_chain, write_page, write_texts
from olive_ext.report.scores import chain_steps, chain_table
from olive_ext.report.terminal import print_cells, print_page, print_table
from olive_ext.report.view import Table

__all__ = [
    "Metric",
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
    "print_cells",
    "print_page",
    "print_table",
    "to_html",
    "to_json",
    "to_markdown",
    "write",
    "write_chain",
    "write_page",
    "write_texts",
]
