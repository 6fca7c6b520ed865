"""The public contract: `open` a model, ask the `Session`."""

from olive_ext.session.opening import open
from olive_ext.session.session import Session

__all__ = ["Session", "open"]
