"""Compares a model with a reference while it is scored: a tap on steps. Knows no scheduler."""
