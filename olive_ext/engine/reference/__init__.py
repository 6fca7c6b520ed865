"""Compares a model with a reference while it is scored: a tap on steps, and the graphs that compare logits rows.

A session chooses `ResidentTap`, `WritingTap` or `ReadingTap`. Knows no scheduler.
"""
