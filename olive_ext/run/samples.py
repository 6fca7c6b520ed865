"""Logs of questions and answers: a file of JSON lines for each task, replaced as a whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olive_ext.errors import RunError


def write_samples(samples: Mapping[str, Sequence[Mapping[str, Any]]], num_documents: int, folder: Path) -> list[Path]:
    """Writes `samples_<task>.jsonl` with the first `num_documents` documents of each task; returns the paths.

    A document has a line for each of the task's filters, in lm-eval's own sample format. Raises `RunError` where the
    disk refuses.
    """
    from olive_ext.backends.harness import sample_line

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for task, lines in samples.items():
            documents = sorted({line["doc_id"] for line in lines})[:num_documents]
            text = "".join(sample_line(line) for line in lines if line["doc_id"] in documents)
            written.append(_replace(folder / f"samples_{_file_name(task)}.jsonl", text))
    except OSError as error:
        raise RunError(f"cannot write the sample logs to '{folder}': {error.strerror or error}") from error
    return written


def _file_name(task: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task)


def _replace(path: Path, text: str) -> Path:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
