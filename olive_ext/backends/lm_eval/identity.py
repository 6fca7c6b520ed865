"""What an answer depends on besides its request, as one key for caches of answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from olive_ext.backends.package_versions import RUNTIMES, versions


def answers_key(
    content_hash: str | None, execution: Mapping[str, Any], max_length: int, deciding: Mapping[str, Any]
) -> str:
    """Digest (16 hex digits) of the model's content (its path where that is unknown), how it runs, and the arguments
    that decide answers."""
    facts = {
        "model": content_hash or execution.get("model"),
        "adapters": sorted(execution.get("adapters", {}).values()),
        "providers": execution.get("providers"),
        "max_length": max_length,
        "versions": {name: found for name, found in versions().items() if name in RUNTIMES},
        **deciding,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
