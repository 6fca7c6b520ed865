"""What has been counted since an engine was opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What has been asked, fed and shared since the engine was opened."""

    requests: int = 0
    tokens_naive: int = 0
    tokens_distinct: int = 0
    tokens_generated: int = 0
    tokens_fed: int = 0
    steps: int = 0
    idle_rows: int = 0
    steps_ahead: int = 0
    """Steps that began before the one before them had been read."""

    rows_dropped: int = 0
    """Rows of such steps whose sequence turned out to have ended."""

    prefix_hits: int = 0
    tokens_reused: int = 0
    copies: int = 0
    moves: int = 0
    steps_halved: int = 0
