"""A summary of a comparison of speed: a table on the terminal, markdown, and a picture of requests a second. Knows no
run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.benchmarks.speed.latency import LATENCIES, STATISTICS
from docs.benchmarks.speed.summary import BackendRow, Summary
from olive_ext.report.plain_text import Table, literal, markdown_table, print_cells, print_lines

HEADS = (
    *("backend", "batch", "requests/s", "tokens/s", "in model s", "process s", "MB above model", "MB peak"),
    *("ours / it", "answers"),
)


def cells(row: BackendRow, reference: str | None) -> tuple[str, ...]:
    """The cells of one line of the table, in the order of `HEADS`."""
    if not row.rounds:
        return (row.backend, *("",) * (len(HEADS) - 2), "failed" if row.error else "not run")
    above = row.memory_above if row.device_above is None else row.device_above
    most = row.memory_peak if row.device_peak is None else row.device_peak
    answers = "reference" if row.backend == reference else _agreement(row.agreement)
    return (
        row.backend,
        "" if row.batch_size is None else str(row.batch_size),
        f"{row.requests_per_second:.2f}",
        f"{row.tokens_per_second:.0f}" + ("" if row.fed_per_second is None else f" (fed {row.fed_per_second:.0f})"),
        *(f"{row.seconds:.1f}", f"{row.seconds_total:.1f}", f"{above / 1e6:.0f}", f"{most / 1e6:.0f}"),
        "" if row.speedup is None else "{:.2f} ({:.2f} to {:.2f})".format(*row.speedup),
        "; ".join(part for part in (answers, "failed in a round" if row.error else "") if part),
    )


def _agreement(agreement: Mapping[str, Any]) -> str:
    """For instance: "max 1.2e-05, mean 2.0e-06, choices 60 of 60"."""
    if not agreement:
        return ""
    parts = ["DIFFERS"] if agreement["differs"] else []
    if "max_difference" in agreement:
        parts.append(f"max {agreement['max_difference']:.1e}, mean {agreement['mean_difference']:.1e}")
    parts += [f"{key} {agreement[key][0]} of {agreement[key][1]}" for key in ("choices", "texts") if key in agreement]
    return ", ".join(parts)


def facts(summary: Summary) -> list[str]:
    """The lines under the table, a sentence each."""
    lines = [f"{summary.num_requests} requests"]
    if summary.tokens_naive is not None:
        lines[0] += f", {summary.tokens_naive} tokens, {summary.tokens_distinct} of them in distinct prefixes"
    if summary.fed_over_distinct is not None:
        lines.append(f"tokens fed / distinct: {summary.fed_over_distinct:.3f}")
    if summary.utilisation is not None and summary.ceiling is not None:
        ceiling = f"{summary.ceiling / 1e9:.1f} GFLOP/s"
        lines.append(f"{summary.utilisation:.0%} of the matrix-product ceiling measured here ({ceiling})")
    if summary.host_bytes is not None:
        lines.append(f"{summary.host_bytes:.0f} bytes of each request crossed from the device to the host")
    if summary.reference is not None:
        lines.append(f"answers are compared with those of {summary.reference}; all backends were given the same tokens")
    lines += [f"{row.backend} failed: {row.error}" for row in summary.rows if row.error]
    return lines


def latency_table(series: Sequence[Mapping[str, float]]) -> Table:
    """A line for each number of requests in flight, cold and warmed."""
    lines = []
    for one in series:
        speeds = (f"{one['requests_per_second']:.2f}", f"{one['tokens_per_second']:.0f}")
        latencies = [" / ".join(f"{one[f'{name}_{key}_ms']:.1f}" for key in STATISTICS) for name in LATENCIES]
        lines.append((f"{one['in_flight']:.0f}", "warmed" if one["is_warm"] else "cold", *speeds, *latencies))
    title = f"Latencies in milliseconds ({', '.join(STATISTICS)})"
    heads = ("in flight", "state", "requests/s", "tokens/s", *LATENCIES.values())
    return Table(title, heads, lines, ("state",))


def to_markdown(summary: Summary, title: str) -> str:
    """The table and the facts as GitHub markdown."""
    rows = [cells(row, summary.reference) for row in summary.rows]
    parts = [f"# {literal(title)}", markdown_table(HEADS, rows)]
    parts.append("\n".join(f"- {literal(line)}" for line in facts(summary)))
    if summary.latencies:
        table = latency_table(summary.latencies)
        parts.append(f"## {literal(table.title)}\n\n{markdown_table(table.heads, table.rows)}")
    return "\n\n".join(parts) + "\n"


def print_summary(summary: Summary, title: str) -> None:
    """Prints table and facts. Never cuts a cell."""
    rows = [cells(row, summary.reference) for row in summary.rows]
    print_cells(Table(title, HEADS, rows, ("backend", "answers")))
    print_lines(facts(summary))
    if summary.latencies:
        print_cells(latency_table(summary.latencies))


def draw(summary: Summary, title: str, path: Path) -> None:
    """Writes the picture: requests a second of each backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.subplots()
    rows = [row for row in summary.rows if row.rounds]
    names = [row.backend if row.batch_size is None else f"{row.backend} (batch {row.batch_size})" for row in rows]
    bars = axis.barh(names[::-1], [row.requests_per_second for row in rows[::-1]], color="#4477aa")
    axis.bar_label(bars, fmt="%.2f", padding=3)
    axis.margins(x=0.15)
    axis.set_xlabel("requests per second")
    axis.set_title(title, fontsize=9)
    figure.savefig(path, dpi=120)
