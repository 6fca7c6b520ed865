"""Runners execute steps: `runner.Runner` is their interface, and each room below holds one kind of runner.

`opening` imports the rooms' openers; `shape_buckets` and `trials` serve every kind. Knows no scheduler and no request.
"""
