"""What was run, on what, with which versions: facts of several reports side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from olive_ext.report.html import numbers as numbers
from olive_ext.report.page import Column

_MISSING = "\N{EM DASH}"


@dataclass(frozen=True)
class FactRow:
    name: str
    values: tuple[str, ...]
    differs: bool


@dataclass(frozen=True)
class FactTable:
    title: str
    columns: tuple[str, ...]
    rows: tuple[FactRow, ...]


def setup_tables(columns: Sequence[Column]) -> list[FactTable]:
    """Configuration, model, hardware, providers, versions and counters of the columns that have a report."""
    known = [column for column in columns if column.report is not None]
    reports = [column.report for column in known if column.report is not None]
    parts: list[tuple[str, list[Mapping[str, Any]]]] = [
        ("Model", [report.model for report in reports]),
        ("Hardware", [_hardware(report.hardware) for report in reports]),
        (
            "Providers",
            [{str(item.get("name", "")): _provider(item) for item in report.providers} for report in reports],
        ),
        ("Versions", [report.versions for report in reports]),
        ("Configuration", [report.config for report in reports]),
        ("Engine", [report.engine for report in reports]),
    ]
    names = tuple(column.name for column in known)
    tables = [FactTable(title, names, _rows([numbers.flat(item) for item in facts])) for title, facts in parts]
    return [table for table in tables if table.rows]


def _rows(facts: Sequence[Mapping[str, str]]) -> tuple[FactRow, ...]:
    names = dict.fromkeys(name for item in facts for name in item)
    rows = []
    for name in names:
        values = tuple(item.get(name, _MISSING) for item in facts)
        rows.append(FactRow(name, values, len(set(values)) > 1))
    return tuple(rows)


def _hardware(facts: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(facts)
    if isinstance(shown.get("memory_bytes"), int | float):
        shown["memory"] = numbers.size(shown.pop("memory_bytes"))
    return shown


def _provider(provider: Mapping[str, Any]) -> str:
    parts = [numbers.short(provider[key]) for key in ("device", "options") if provider.get(key)]
    origin = provider.get("origin")
    return "; ".join([*parts, *([f"from {origin}"] if origin else [])]) or "in use"


@dataclass(frozen=True)
class TaskRow:
    name: str
    version: str
    shots: str
    documents: str
    kind: str


def task_rows(columns: Sequence[Column]) -> list[TaskRow]:
    """Version, shots, documents and kind of each task, from the first report that ran it."""
    rows: dict[str, TaskRow] = {}
    for column in columns:
        results = column.report.results if column.report is not None else {}
        for task in results.get("n-samples", {}):
            rows.setdefault(task, _task(task, results))
    return list(rows.values())


def _task(task: str, results: Mapping[str, Any]) -> TaskRow:
    counted = results["n-samples"][task]
    effective, original = counted.get("effective"), counted.get("original")
    documents = numbers.count(effective) if effective is not None else _MISSING
    if original not in (None, effective):
        documents = f"{documents} of {numbers.count(original)}"
    return TaskRow(
        name=task,
        version=numbers.short(results.get("versions", {}).get(task)),
        shots=numbers.short(results.get("n-shot", {}).get(task)),
        documents=documents,
        kind=str((results.get("configs", {}).get(task) or {}).get("output_type", _MISSING)).replace("_", " "),
    )
