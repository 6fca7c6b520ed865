"""Execution providers of this machine: their rows, their sessions, their memory, and the graphs that they compile."""
