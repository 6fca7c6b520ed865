"""Batched evaluation of ONNX language models inside Microsoft Olive.

`olive_ext.open(MODEL)` gives a session, `olive_ext.evaluate(config)` a report. Both are imported at their
first use: importing the package itself imports no library, and switches the telemetry of those off that it will use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from olive_ext.telemetry import switch_off

if TYPE_CHECKING:
    from olive_ext.run import evaluate
    from olive_ext.session import open

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "open"]

switch_off(os.environ)

_HOMES = {"evaluate": "olive_ext.run", "open": "olive_ext.session"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'olive_ext' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
