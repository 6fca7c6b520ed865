"""Statistics of two models on the same documents: distances between distributions, differences between answers.

Pure functions on numpy arrays; knows no model, no tokenizer and no evaluation framework.
"""

from olive_ext.stats.distances import measure_divergence
from olive_ext.stats.paired_answers import compare_outcomes
from olive_ext.stats.positions import ComparedTargets, Positions
from olive_ext.stats.token_classes import CLASSES, TokenClasses

__all__ = [
    "CLASSES",
    "ComparedTargets",
    "Positions",
    "TokenClasses",
    "compare_outcomes",
    "measure_divergence",
]
