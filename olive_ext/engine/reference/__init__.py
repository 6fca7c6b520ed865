"""Compares a model with a reference while it is scored: one tap on steps, and the kernels that compare logits rows.

A session chooses one of `tap.ResidentTap`, `recorded.WritingTap` and `recorded.ReadingTap`. Knows no scheduler.
"""
