"""The quickstart's model in two places, by one command line's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olive_ext.report import Report
from olive_ext.run import evaluate
from tests.exports.quickstart import TASKS, exported

WORK: dict[str, Any] = {"tasks": ["quickstart_choice"], "include_path": str(TASKS), "limit": 16, "bootstrap_iters": 0}


def compared(reference: Any, model: Path | None = None, **settings: Any) -> Report:
    """The report of an evaluation of the float model, or `model`, against `reference`."""
    return evaluate(model or exported(), reference=reference, **{**WORK, **settings})
