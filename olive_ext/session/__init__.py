"""The public contract: `open` a model, ask the `Session`.

Texts in, log-probabilities and texts out. Other rooms import `open`, `Session`, and `opening.open_model` for a model
that is resolved already; nothing here knows an evaluation framework or the library that runs the model.
"""

from olive_ext.session.opening import open
from olive_ext.session.session import Session

__all__ = ["Session", "open"]
