"""Rows of caches that the graph returns anew: those that are alike share a step."""
