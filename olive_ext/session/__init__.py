"""The public contract: `open` a model, send requests to the `Session`.

Texts in, log-probabilities and texts out. Other rooms import `open`, `Session`, and `opening.open_model` for a model
that is resolved already; `requests` (a session's requests and outputs) and `tokenizer` open nothing, so that the engine
is imported with the first session. Nothing here knows an evaluation framework or the library that runs the model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olive_ext.session.opening import open
    from olive_ext.session.session import Session

__all__ = ["Session", "open"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'olive_ext.session' has no attribute '{name}'")
    from olive_ext.session import opening

    return getattr(opening, name)
