"""Runners execute steps: `base.Runner` says what one is, each room below holds one kind of them.

`opening` imports the rooms' openers; `shape_buckets` and `trials` serve every kind. Knows no scheduler and no request.
"""
