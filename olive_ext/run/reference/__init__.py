"""Evaluation with a reference: the mode it is run in, both models opened and observed, their answers paired.

An evaluation imports `modes.comparer_of` and `comparison_run.Comparer`; logs and reports `answers` and `pairing`.
Knows no graph, no engine and no form of a report.
"""
