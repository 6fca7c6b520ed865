"""Models that lmms-eval drives: `--model olive_ext`, which an entry point registers. Importing it imports no other."""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """What lmms-eval's registry reads from the entry point of the group "lmms_eval.models": one name, two classes."""
    from lmms_eval.models.registry_v2 import ModelManifest

    place = "olive_ext.plugins.suites.lmms_eval.ort_lmms"
    return ModelManifest("olive_ext", f"{place}.OrtSimple", f"{place}.OrtChat", aliases=("olive-ext",))
