"""Why a task's data files cannot be loaded: the file, the line and the reason, which `datasets`, reading in blocks of
columns, does not tell. Looks at local files only, and only once loading has failed. Knows no task."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from olive_ext.backends.task_files import data_files
from olive_ext.errors import first_line, keys_once

_SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def fault_of(config: Mapping[str, Any]) -> str | None:
    """The first fault of the files that a task's configuration names, or of those in the folder that it names, as a
    file, a line and a reason; None where none is found."""
    origin = config.get("dataset_path")
    files = data_files(config)
    if not files and isinstance(origin, str) and Path(origin).is_dir():
        files = sorted(path for path in Path(origin).rglob("*") if path.suffix in _SUFFIXES)
    for file in files:
        kind = _SUFFIXES.get(file.suffix, origin)
        read = _READERS.get(str(kind))
        if read is not None and file.is_file() and (fault := _fault(file, read)):
            return f"'{file}'{fault}"
    return None


def _fault(file: Path, read: Callable[[Path], Iterator[str]]) -> str | None:
    try:
        return next(read(file), None)
    except UnicodeDecodeError as error:
        line = file.read_bytes()[: error.start].count(b"\n") + 1 if error.object else 1
        return f", line {line}: byte {error.object[error.start]:#04x} is no UTF-8"
    except (OSError, ValueError, RecursionError) as error:
        return f": {first_line(error)}"


def _text(file: Path) -> TextIO:
    content = file.read_bytes()
    content.decode("utf-8-sig")  # as a whole, so that an error gives its place in the file
    return file.open(encoding="utf-8-sig", newline="")


def _json(file: Path) -> Iterator[str]:
    """Faults of one JSON document, or of one in each line."""
    with _text(file) as lines:
        begin = next(filter(None, map(str.strip, lines)), "")
        if not begin:
            yield ": it has no documents"
            return
        lines.seek(0)
        types: dict[str, type] = {}
        is_one = begin.startswith("[")
        for number, line in enumerate([lines.read()] if is_one else lines, 1):
            if line.strip() and (reason := _json_fault(line, types)):
                yield reason if is_one else f", line {number}: {reason}"


def _json_fault(text: str, types: dict[str, type]) -> str | None:
    """What is wrong with one document, or a list of them; `types` are those of the columns so far."""
    try:
        document = json.loads(text, object_pairs_hook=keys_once)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}: " if text.startswith("[") else ""
        return f"{line}{error.msg}"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return first_line(error)
    for row in document if isinstance(document, list) else [document]:
        if not isinstance(row, dict):
            return f"a {type(row).__name__}, where a document is a mapping of fields"
        for name, value in row.items():
            known = types.setdefault(name, type(value)) if value is not None else type(None)
            if value is not None and known is not type(value) and not {known, type(value)} <= {int, float}:
                return f"'{name}' is of type {type(value).__name__}, and of type {known.__name__} before"
    return None if text.encode("utf-8", "ignore").decode() == text and _is_text(document) else "a lone surrogate"


def _is_text(value: Any) -> bool:
    """Whether all texts in it can be written."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _csv(file: Path) -> Iterator[str]:
    with _text(file) as lines:
        rows = csv.reader(lines, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                yield ": it is empty, and a CSV file begins with a line of names"
                return
            for row in rows:
                if row and len(row) != len(header):
                    yield f", line {rows.line_num}: {len(row)} values under {len(header)} names"
        except csv.Error as error:
            yield f", line {rows.line_num}: {error}"


def _parquet(file: Path) -> Iterator[str]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    parquet.read_table(file)
    yield from ()


_READERS: Mapping[str, Callable[[Path], Iterator[str]]] = {"json": _json, "csv": _csv, "parquet": _parquet}
