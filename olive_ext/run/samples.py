"""Logs of questions and answers: a file of JSON lines for each task, replaced as a whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from olive_ext.errors import RunError

Sample = Mapping[str, Any]
Fields = Callable[[str, Sample], Mapping[str, Any]]
"""What we add to a line, from the task's name and the sample."""

OWN = "olive_ext"
"""The line's key under which our own fields stand; everything else is lm-eval's."""


def write_samples(
    samples: Mapping[str, Sequence[Sample]], num_documents: int, folder: Path, fields: Fields | None = None
) -> list[Path]:
    """Writes `samples_<task>.jsonl` with the first `num_documents` documents of each task; returns the paths.

    A document has a line for each of the task's filters, in lm-eval's own sample format; where `fields` has something
    to add, it stands under the key `OWN`. Raises `RunError` where the disk refuses.
    """
    from olive_ext.backends.lm_eval_run import sample_line

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for task, lines in samples.items():
            documents = set(sorted({line["doc_id"] for line in lines})[:num_documents])
            chosen = (line for line in lines if line["doc_id"] in documents)
            text = "".join(sample_line(_with_own(task, line, fields)) for line in chosen)
            written.append(_replace(log_path(folder, task), text))
    except OSError as error:
        raise RunError(f"cannot write the sample logs to '{folder}': {error.strerror or error}") from error
    return written


def log_path(folder: Path, task: str) -> Path:
    """Where the log of a task lies."""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task)
    return folder / f"samples_{name}.jsonl"


def _with_own(task: str, sample: Sample, fields: Fields | None) -> Sample:
    own = fields(task, sample) if fields is not None else {}
    return {**sample, OWN: own} if own else sample


def _replace(path: Path, text: str) -> Path:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
