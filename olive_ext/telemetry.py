"""Messages about their use that other libraries send to their makers: off in this package's processes and in those that
they start. Knows no framework.

Libraries look at the environment as they are imported, so that this must come first: importing `olive_ext` does it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

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
