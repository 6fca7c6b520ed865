"""The one road of every entry: `evaluate(config) -> Report`."""

from olive_ext.run.evaluation import evaluate

__all__ = ["evaluate"]
