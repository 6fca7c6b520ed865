"""Rows of slots: several tokens of one slot, or one token of each of many."""
