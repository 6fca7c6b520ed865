"""From requests to steps: prefix tree, sequences, slots, beam searches, overlapped steps, and chunks for workers.

The step loop drives a `Scheduler`; `forms` decide which rows share a step. Knows a runner only by its traits.
"""
