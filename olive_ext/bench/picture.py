"""bench.png: requests per second of each backend, and seconds as work grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olive_ext.bench.summary import Summary


def draw(summary: Summary, title: str, growth: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Writes the picture."""
    from matplotlib.figure import Figure

    series = {name: points for name, points in growth.items() if points}
    figure = Figure(figsize=(6.4 * (1 + len(series)), 4.0), layout="constrained")
    axes = figure.subplots(1, 1 + len(series), squeeze=False)[0]
    _bars(axes[0], summary, title)
    for axis, (name, points) in zip(axes[1:], series.items(), strict=True):
        _line(axis, name, points)
    figure.savefig(path, dpi=120)


def _bars(axis: Any, summary: Summary, title: str) -> None:
    rows = [row for row in summary.rows if row.rounds]
    names = [row.backend if row.batch_size is None else f"{row.backend} (batch {row.batch_size})" for row in rows]
    bars = axis.barh(names[::-1], [row.requests_per_second for row in rows[::-1]], color="#4477aa")
    axis.bar_label(bars, fmt="%.2f", padding=3)
    axis.margins(x=0.15)
    axis.set_xlabel("requests per second")
    axis.set_title(title, fontsize=9)


def _line(axis: Any, name: str, points: Sequence[Mapping[str, float]]) -> None:
    """The points, and the line through the origin and the last of them."""
    tokens, seconds = [one["tokens"] for one in points], [one["seconds"] for one in points]
    axis.plot(tokens, seconds, "o-", color="#4477aa", label="measured")
    axis.plot([0, tokens[-1]], [0, seconds[-1]], "--", color="#999999", label="proportional")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens")
    axis.set_ylabel("seconds in the model")
    axis.set_title(f"growth with {name}", fontsize=9)
    axis.legend(fontsize=8)
