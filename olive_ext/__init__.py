"""Batched evaluation of ONNX language models inside Microsoft Olive.

`olive_ext.open(MODEL)` gives a session, `olive_ext.evaluate(MODEL, tasks=[...])` a report, `olive_ext.check(MODEL)`
what a model or a recipe resolves to, `olive_ext.locate` a map of the weights that lose, `olive_ext.mend` a model in
which they do not. They are imported at their first use: importing the package itself imports no library, and switches
off the telemetry of those that it will use, in this process and in those that it starts. Libraries look at the
environment as they are imported, so this comes first.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olive_ext.functions import check, evaluate, locate, mend, open

__version__ = "0.1.0"
__all__ = ["__version__", "check", "evaluate", "locate", "mend", "open"]

SWITCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ORT_DISABLE_TELEMETRY": ("1", ()),  # ONNX Runtime
    "OLIVE_DISABLE_TELEMETRY": ("1", ()),
    "HF_HUB_DISABLE_TELEMETRY": ("1", ("DISABLE_TELEMETRY", "DO_NOT_TRACK")),  # transformers, datasets, huggingface_hub
    "HF_UPDATE_DOWNLOAD_COUNTS": ("0", ()),  # datasets, evaluate
    "MLFLOW_DISABLE_TELEMETRY": ("true", ("DO_NOT_TRACK",)),
    "RAY_USAGE_STATS_ENABLED": ("0", ()),
}
"""Each library's variable with the value that switches it off, and other variables that it looks at."""

_RAYS_CHOICE = Path("~/.ray/config.json")
"""Where `ray enable-usage-stats` notes a choice, which the variable would override."""


def switch_off(environment: MutableMapping[str, str]) -> None:
    """Sets the variables of the libraries of which the user has said nothing; a choice, for or against, stays."""
    for name, (off, others) in SWITCHES.items():
        if not any(known in environment for known in (name, *others)) and not _is_rays_choice(name):
            environment[name] = off


def _is_rays_choice(name: str) -> bool:
    try:
        return name.startswith("RAY_") and _RAYS_CHOICE.expanduser().is_file()
    except (OSError, RuntimeError):  # no home
        return False


switch_off(os.environ)

_HOMES = {"evaluate": "olive_ext.run", "open": "olive_ext.session"}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "check":
        return importlib.import_module("olive_ext.check")
    if name in __all__:
        registry = importlib.import_module("olive_ext.registry")
        if value := registry.entries("functions").get(name):
            return registry.load(value)
    raise AttributeError(f"module 'olive_ext' has no attribute '{name}'")
