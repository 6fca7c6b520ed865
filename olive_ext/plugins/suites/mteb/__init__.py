"""Embeddings: `TextEncoder` makes vectors of texts on this package's engine, `evaluate_tasks` measures them with mteb.

Other rooms may import these names inside functions only; mteb, which is an extra, is imported where tasks run.
"""

from olive_ext.plugins.suites.mteb.evaluation import evaluate_tasks
from olive_ext.plugins.suites.mteb.text_encoder import TextEncoder

__all__ = ["TextEncoder", "evaluate_tasks"]
