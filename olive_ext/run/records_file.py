"""A reference that is a file of records: unpacked for one evaluation, held against its tasks, asked as a model is."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from olive_ext.errors import ConfigError, RecordsError
from olive_ext.records import Records
from olive_ext.records.travelling import unpack
from olive_ext.report.page import SIZE
from olive_ext.run.reference.observer import Observer
from olive_ext.text.tokenizer_fit import Asking


class RecordsFile:
    """The records in the file at `path`, unpacked when they are first needed, until the end of `in_use`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stack = ExitStack()
        self._folder: Path | None = None

    @cached_property
    def _unpacked(self) -> tuple[Path, Mapping[str, Any]]:
        root = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="olive-ext-"))
        self._folder, manifest = unpack(Path(self.path), Path(root))
        return self._folder, manifest

    @property
    def folder(self) -> Path:
        """Where the records lie."""
        return self._unpacked[0]

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What they were made of, by and on."""
        return self._unpacked[1]

    @property
    def digest(self) -> str:
        """Of the recorded model's content."""
        return str(self.manifest["facts"].get("model"))

    @property
    def max_length(self) -> int:
        """Tokens that the recorded model saw at once at most."""
        return int(self.manifest["max_length"])

    @property
    def asking(self) -> Asking | None:
        """How the recorded model was asked; None of older files."""
        known: Any = self.manifest.get("asking")
        return None if known is None else Asking(**known)

    def shorter_than(self, length: int | None) -> int | None:
        """`max_length` where a model that sees `length` tokens must be held to it; else None."""
        return self.max_length if length is None or self.max_length < length else None

    @property
    def facts(self) -> dict[str, Any]:
        """For the report: which model was recorded, when, by what, and where."""
        names = ("versions", "providers", "hardware", "created", "content_hash", "kind", SIZE)
        return {name: self.manifest[name] for name in names if name in self.manifest}

    def refuse_other_tasks(self, tasks: Collection[str]) -> None:
        """Raises `RecordsError` where a task is none of those recorded."""
        recorded = self.manifest["tasks"]
        if missing := sorted(set(tasks) - set(recorded)):
            known = ", ".join(sorted(recorded))
            raise RecordsError(f"the records '{self.path}' hold nothing of task '{missing[0]}': they are of {known}")

    def answering(self, candidate: Any, observer: Observer) -> Any:
        """An `OrtLM` that answers as the recorded model did, with the tokenizer of the open `candidate`."""
        from olive_ext.session.replayed import replayed

        stop_ids = self.manifest.get("stop_ids", candidate.session.stop_ids)  # older files name none
        records = Records.read(self.folder), self.max_length, self.manifest["answers"]
        session = replayed(candidate.session, *records, stop_ids)
        if session.journal is not None:
            self._stack.callback(session.journal.close)
        return candidate.over(session, observer)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Removes what was unpacked at the end; an error that names that folder names the file instead."""
        try:
            yield
        except (RecordsError, ConfigError) as error:
            if self._folder is None:
                raise
            raise type(error)(str(error).replace(str(self._folder), self.path)) from error
        finally:
            self._stack.close()
