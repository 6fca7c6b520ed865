"""From requests to steps: prefix tree, sequences, slots, beam searches, overlapped steps; chunks for workers.

The step loop drives a `Scheduler`; which rows share a step is up to `forms`. Knows no runner but its traits.
"""
