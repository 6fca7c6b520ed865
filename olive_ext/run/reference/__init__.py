"""Evaluation with a reference: how it is run, both models opened and observed, their answers paired.

`modes.comparer_of` is what an evaluation imports from here; `answers` and `pairing` also serve earlier reports, and
`models.reference_config` whoever checks a configuration. Knows no graph, no engine and no form of a report.
"""
