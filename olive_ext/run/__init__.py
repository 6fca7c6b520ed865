"""What every entry calls: `evaluate(config) -> Report`; and `compare` over earlier reports."""

from olive_ext.run.earlier_reports import compare
from olive_ext.run.evaluation import check_complete, evaluate

__all__ = ["check_complete", "compare", "evaluate"]
