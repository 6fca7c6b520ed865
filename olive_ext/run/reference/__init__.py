"""Evaluation with a reference: its mode, both models opened and observed, their answers paired.

An evaluation imports `comparison_run.TaskRun`; logs and earlier reports import `answers`. Knows no graph, no engine and
no form of a report.
"""
