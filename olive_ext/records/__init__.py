"""What a reference model said, kept on disk: a short record of its distribution at every scored position."""

from olive_ext.records.form import Form
from olive_ext.records.store import Records, Said, request_key

__all__ = ["Form", "Records", "Said", "request_key"]
