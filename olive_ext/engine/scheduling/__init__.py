"""Requests to steps: prefix tree, sequences, slots, tree batches and their cost, overlapped steps.

The step loop imports `Scheduler`, `make_plan` and `ScoringSteps` from here. Knows no runner but its traits.
"""
