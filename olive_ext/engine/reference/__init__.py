"""Compares a model with a reference while it is scored: one tap on steps, and the kernels that compare logits rows.

A session chooses one of `ResidentTap`, `WritingTap` and `ReadingTap`. Knows no scheduler.
"""
