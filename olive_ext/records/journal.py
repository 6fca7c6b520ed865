"""Answers that have been computed, on disk: a file that only grows, a line for each chunk of requests.

    <CRC-32 of the rest> {"facts": {...}}                       what decides every answer in the file
    <CRC-32 of the rest> {"answers": {"<key of a request>": ...}}

A line counts as a whole or not at all. A line that an interruption cut short is removed, and a damaged line is skipped;
its answers are computed again. A line with a right checksum and other content was not written by this package: then
nothing of the file is used. Knows no request and no model: keys are digests, answers are JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Mapping
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from olive_ext.errors import RecordsError, first_line, one_line
from olive_ext.records.files import locked, make_own_folder, open_own

logger = logging.getLogger(__name__)


def facts_key(facts: Mapping[str, Any]) -> str:
    """Digest (16 hex digits) of the facts that decide answers: part of the name of a journal's file."""
    return hashlib.sha256(_line(facts)).hexdigest()[:16]


def read_facts(path: Path) -> dict[str, Any]:
    """The facts that the journal at `path` belongs to."""
    with path.open("rb") as file:
        facts: dict[str, Any] = json.loads(file.readline().partition(b" ")[2])["facts"]
    return facts


class Journal:
    """The answers in `path`, which belongs to `facts`. One process writes at a time.

    Only the offsets of the answers are held in memory. Where the disk refuses a line, nothing more is written, and the
    evaluation goes on. Raises `RecordsError` where another process has the file, it cannot be opened, or is not of
    this package or of these `facts`.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], *, resume: bool = True) -> None:
        self.path = path
        self._facts = facts_key(facts)
        self.num_written = 0
        self._offsets: dict[bytes, int] = {}
        self._latest: tuple[int, Mapping[str, Any]] = (-1, {})
        try:
            make_own_folder(path.parent)
            self._lock = locked(
                Path(f"{path}.lock"),
                f"another run is writing the answers in '{path}': wait, or give another 'output_dir' or 'use_cache'",
            )
            self._file = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            if not resume:
                os.truncate(self._file, 0)
            try:
                self._end = self._read()
            except RecordsError:
                self.close()
                raise
            if not self._end:
                self._write({"facts": facts})
        except OSError as error:
            raise RecordsError(f"the journal of answers '{path}' cannot be used: {first_line(error)}") from error
        self.num_known = len(self._offsets)
        self._begin = self._end
        self._used: set[bytes] = set()
        self._is_writable = True

    def __contains__(self, key: bytes) -> bool:
        return key in self._offsets

    def __getitem__(self, key: bytes) -> Any:
        """The answer of a request, any JSON. Lines are read one at a time: neighbours are asked for together."""
        offset = self._offsets[key]
        if offset < self._begin:
            self._used.add(key)
        if self._latest[0] != offset:
            self._latest = offset, self._at(offset)["answers"]
        return self._latest[1][key.hex()]

    def add(self, answers: Mapping[bytes, Any]) -> None:
        """Keeps the answers of a chunk. They count from then on, whatever happens to this process."""
        if not self._is_writable or not answers:
            return
        offset = self._end
        try:
            self._write({"answers": {key.hex(): answer for key, answer in answers.items()}})
        except OSError as error:
            self._is_writable = False
            logger.warning(
                "'%s' takes no more answers (%s): the evaluation goes on, and can be resumed from the %d that are "
                "there",
                self.path,
                first_line(error),
                len(self._offsets),
            )
            return
        self.num_written += len(answers)
        self._offsets.update(dict.fromkeys(answers, offset))

    def close(self) -> None:
        """Lets other processes write. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._lock.release()

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts with stable names. `answers_known`: answers of earlier runs in the file, to any requests;
        `answers_used`: the ones of these that this run did not compute again."""
        counts = {"known": self.num_known, "used": len(self._used), "written": self.num_written}
        return {"file": str(self.path), **{f"answers_{name}": count for name, count in counts.items()}}

    def _read(self) -> int:
        """Notes the offsets of the answers, and cuts off an unfinished last line; returns the size that is left."""
        offset, damaged = 0, 0
        with self._reader() as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                content = self._content(line, f"line {number}")
                damaged += content is None
                for key in (content or {}).get("answers", ()):
                    self._offsets[bytes.fromhex(key)] = offset
                offset += len(line)
        size = os.fstat(self._file).st_size
        if damaged or size > offset:
            logger.warning(
                "'%s': %d damaged lines are passed over, %d bytes of an unfinished one are cut off; the %d answers in "
                "the others are used",
                self.path,
                damaged,
                size - offset,
                len(self._offsets),
            )
            os.truncate(self._file, offset)
        return offset

    def _at(self, offset: int) -> Mapping[str, Any]:
        with self._reader() as file:
            file.seek(offset)
            content = self._content(file.readline(), f"the line at {offset}")
        if content is None:
            raise RecordsError(f"'{self.path}' has changed while it was in use: delete it to compute its answers anew")
        return content

    def _content(self, line: bytes, where: str) -> Mapping[str, Any] | None:
        """The content of a line; None where it is cut or changed. `RecordsError` if this package did not write it."""
        checksum, _, body = line[:-1].partition(b" ")
        if checksum != b"%08x" % zlib.crc32(body):
            return None
        try:
            content: Any = json.loads(body)
            match content:
                case {"facts": dict(facts)} if facts_key(facts) == self._facts:
                    return {"facts": facts}
                case {"answers": dict(answers)} if all(map(bytes.fromhex, answers)):
                    return {"answers": answers}
        except (ValueError, RecursionError) as error:
            raise self.foreign(where, one_line(error)) from error
        raise self.foreign(where, f"facts of other settings, or no answers by digests: {body[:60]!r}")

    def foreign(self, where: str, why: str) -> RecordsError:
        """The error for content that was not written here."""
        return RecordsError(
            f"the journal of answers '{self.path}' does not belong to this evaluation: {where} holds {why}; give "
            "another 'output_dir' or 'use_cache', or delete the file to compute its answers anew"
        )

    def _reader(self) -> BufferedReader:
        """The file, by its descriptor: the path may lead to another file by now."""
        return BufferedReader(FileIO(os.dup(self._file)))

    def _write(self, content: Mapping[str, Any]) -> None:
        """Writes a line to the disk itself; a line that fails halfway is removed."""
        body = _line(content)
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        try:
            written = os.write(self._file, line)
            if written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError:
            os.truncate(self._file, self._end)
            raise
        self._end += len(line)


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=str).encode()
