"""One table over the reports of a model on its way through a chain of passes. Pure functions of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from olive_ext.report.compared_metrics import NAMES
from olive_ext.report.comparison import ALL
from olive_ext.report.render import markdown_table, number, print_rows
from olive_ext.report.report import Metric, Report, plain
from olive_ext.report.report_files import write_texts

PASSES = "passes"
"""Key of `Report.model`: the names of the passes that made the measured model, in order."""

SIZE, SPEED, REQUESTS = "size_on_disk", "tokens_per_second", "requests_per_second"
_COST = (SIZE, SPEED, "peak_memory")
_DISTANCES = ("kl_mean", "top1_agreement", "perplexity_ratio")


@dataclass(frozen=True)
class Step:
    """A model of the chain as it was measured: its name, and its numbers by column."""

    name: str
    values: dict[str, float]


def steps(reports: Sequence[Report]) -> list[Step]:
    """A step for each report, in order: size in bytes, tokens per second, distances to the reference, and each task's
    first metric. What a report does not have is left out."""
    return [Step(_name(report), dict(_values(report))) for report in reports]


def _name(report: Report) -> str:
    passes = report.model.get(PASSES)
    if passes is None:
        return str(report.model.get("path", "model"))
    return " -> ".join(str(name) for name in passes) or "input model"


def _values(report: Report) -> Iterator[tuple[str, float]]:
    first: dict[str, Metric] = {}
    for metric in report.metrics:
        if metric.metric in _DISTANCES and metric.task == ALL:
            yield metric.metric, metric.value
        elif metric.task in _COST:
            if metric.task != SPEED or metric.value > 0:  # a baseline counts no tokens
                yield metric.task, metric.value
        elif metric.task not in (ALL, REQUESTS) and metric.metric not in NAMES:
            first.setdefault(metric.task, metric)
    yield from ((f"{metric.task} {metric.metric}", metric.value) for metric in first.values())


def heads(found: Sequence[Step]) -> list[str]:
    """The columns that some step has: cost first, then distances, then tasks as they come."""
    seen = dict.fromkeys(name for step in found for name in step.values)
    known = [name for name in (*_COST, *_DISTANCES) if name in seen]
    return ["step", *known, *(name for name in seen if name not in known)]


def rows(found: Sequence[Step]) -> list[list[str]]:
    """The cells in the order of `heads`."""
    columns = heads(found)[1:]
    return [[step.name, *(_cell(name, step.values.get(name)) for name in columns)] for step in found]


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column == SIZE and math.isfinite(value):
        return f"{value / 1e6:,.2f} MB"
    return f"{value:,.0f}" if column == SPEED and math.isfinite(value) else number(value)


def write_chain(found: Sequence[Step], directory: str | Path) -> tuple[Path, Path]:
    """Writes chain.json and chain.md into `directory`; raises `RunError` where the disk refuses."""
    directory = Path(directory)
    texts = {directory / "chain.json": chain_json(found), directory / "chain.md": chain_markdown(found)}
    write_texts(texts, directory)
    json_path, markdown_path = texts
    return json_path, markdown_path


def chain_json(found: Sequence[Step]) -> str:
    """Strict JSON: {"steps": [{"name": ..., "values": {column: number}}]}."""
    return json.dumps({"steps": plain(list(found))}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def chain_markdown(found: Sequence[Step]) -> str:
    """GitHub markdown."""
    return f"# The chain, step by step\n\n{markdown_table(heads(found), rows(found))}\n"


def print_chain(found: Sequence[Step], file: IO[str] | None = None) -> None:
    """Prints the table to stdout, or to `file`."""
    columns = heads(found)
    print_rows("The chain, step by step", columns, rows(found), columns[1:], file)
