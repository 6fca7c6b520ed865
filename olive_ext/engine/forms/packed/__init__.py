"""Packed steps: the tokens of many slots, each behind its own past, which lies in blocks that a table names."""
