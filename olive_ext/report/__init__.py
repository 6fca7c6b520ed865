"""What an evaluation found, and its forms: JSON, markdown, a table on the terminal, files."""

from olive_ext.report.html.render import to_html
from olive_ext.report.page_table import print_page
from olive_ext.report.render import print_table, to_markdown
from olive_ext.report.report import Metric, Report, from_json, has_several_filters, metric_key, plain, to_json
from olive_ext.report.report_files import check_writable, write, write_page

__all__ = [
    "Metric",
    "Report",
    "check_writable",
    "from_json",
    "has_several_filters",
    "metric_key",
    "plain",
    "print_page",
    "print_table",
    "to_html",
    "to_json",
    "to_markdown",
    "write",
    "write_page",
]
