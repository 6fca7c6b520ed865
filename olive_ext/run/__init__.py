"""The one road of every entry: `evaluate(config) -> Report`; and `compare` over earlier reports."""

from olive_ext.run.earlier_reports import compare
from olive_ext.run.evaluation import evaluate

__all__ = ["compare", "evaluate"]
