"""The public contract: `open` a model, send requests to the `Session`.

Texts in, log-probabilities and texts out. Other rooms import `open`, `Session`, and `opening.open_model` for a model
that is resolved already; nothing here knows an evaluation framework or the library that runs the model.
"""

from olive_ext.session.opening import open
from olive_ext.session.session import Session

__all__ = ["Session", "open"]
