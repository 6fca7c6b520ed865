"""The reference log-prob cache on disk: a short record of the reference's distribution at every scored position.

`Records` holds them, `Form` decides how much of a distribution is kept. Knows no model, no session and no task.
"""

from olive_ext.records.store import Form, Records, request_key, scored_targets

__all__ = ["Form", "Records", "request_key", "scored_targets"]
