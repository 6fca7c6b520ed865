"""The records of a reference as one file that travels: a zip archive, not compressed, of the parts of their folder.

    manifest.json    the format's version, key and form, and what they were made of, by and on
    index.json, records.bin, targets.bin, requests.bin, answers_<digest>.jsonl    as in the folder

Every part has a checksum, by which it is read. Knows no model and no request.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from olive_ext.errors import RecordsError, RunError, first_line
from olive_ext.records.files import make_own_folder

VERSION = 1
MANIFEST = "manifest.json"
_PART = re.compile(r"(manifest|index)\.json|(records|targets|requests)\.bin|answers_[0-9a-f]+\.jsonl")


def pack(folder: Path, file: Path, manifest: Mapping[str, Any]) -> int:
    """Writes the records in `folder` to `file`, whole or not at all; returns the bytes written. Raises `RunError`."""
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    content = json.dumps({"version": VERSION, "key": folder.name, **manifest}, indent=1)
    try:
        with draft.open("xb") as target, zipfile.ZipFile(target, "w") as archive:
            archive.writestr(MANIFEST, content)
            for path in sorted(path for path in folder.iterdir() if _PART.fullmatch(path.name)):
                archive.write(path, path.name)
            archive.close()
            target.flush()
            os.fsync(target.fileno())
        draft.replace(file)
    except OSError as error:
        raise RunError(f"cannot write the records to '{file}': {error.strerror or error}", code="no_access") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return file.stat().st_size


def unpack(file: Path, root: Path) -> tuple[Path, dict[str, Any]]:
    """Puts the records in `file` into a folder of their own in `root`; returns that folder and the manifest. Raises
    `RecordsError` where the file does not exist, this package did not write it, or it is damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            manifest = _manifest(file, archive)
            folder = make_own_folder(root / manifest["key"])
            archive.extractall(folder)
        return folder, manifest
    except RecordsError:
        raise
    except FileNotFoundError as error:
        raise RecordsError(f"the records '{file}': no such file", code="not_found") from error
    except (zipfile.BadZipFile, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordsError(
            f"'{file}' is no file of records, or was cut off or changed on its way ({first_line(error)}): copy it again"
        ) from error
    except OSError as error:
        raise RecordsError(f"cannot read the records '{file}': {error.strerror or error}", code="no_access") from error


def _manifest(file: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    names = [part.filename for part in archive.infolist()]
    if wrong := [name for name in names if not _PART.fullmatch(name)]:
        raise ValueError(f"it has a part '{wrong[0][:80]}'")
    if len(set(names)) < len(names) or any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
        raise ValueError("a part is there twice, or compressed")
    manifest: dict[str, Any] = json.loads(archive.read(MANIFEST))
    if lacking := sorted({"version", "key", "facts", "tasks", "max_length", "answers"} - manifest.keys()):
        raise ValueError(f"its manifest has no '{lacking[0]}'")
    if manifest["version"] != VERSION:
        raise RecordsError(f"'{file}' has format {manifest['version']!r}, and this is {VERSION}: record anew")
    if not re.fullmatch("[0-9a-f]{16}", manifest["key"]) or not isinstance(manifest["facts"], dict):
        raise ValueError("its manifest was not written here")
    return manifest
