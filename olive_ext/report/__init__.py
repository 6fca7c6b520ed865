"""The results of an evaluation as plain data, and their forms: JSON, one table (terminal, markdown) and one HTML page.

The data are in `report`, `metrics`, `comparison` and `page`; `verdict` and `view` turn them into cells and
sentences once; `plain_text` and `html` lay those out; `report_files` writes them. All of it is pure
but for the last. Reports, and their way to files and back, are imported from here; all else from its module. The room
knows no model, no statistics and no evaluation framework.
"""

from olive_ext.report.metrics import Metric
from olive_ext.report.report import PackedAnswers, Report, from_json, to_json
from olive_ext.report.report_files import check_writable, write, write_texts

__all__ = ["Metric", "PackedAnswers", "Report", "check_writable", "from_json", "to_json", "write", "write_texts"]
