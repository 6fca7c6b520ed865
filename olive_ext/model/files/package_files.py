"""Which files a model's folder may have this package open: its own, and no others.

A file is one of the folder's where it lies in it once every symbolic link on the way is followed, or among the blobs of
Hugging Face's cache, to which all names of a snapshot are links. Knows no file's content.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from olive_ext.errors import DamagedError, ModelError, first_line, keys_once, special_kind

LARGEST = 16 * 2**20
"""Bytes of a configuration; chat templates, the longest part of any, have some ten thousand."""

_LARGEST_INDEX = 2**28
"""Bytes of an index of weights: some hundred for each tensor, of which models of experts have 200,000."""

_INDICES = {"*.index.json": "weight_map", "tokenizer_config.json": "fast_tokenizer_files"}
"""Files of a Hugging Face model that name others, and the key under which they do."""

_NAMES_FILE = re.compile(r"(file|filename|folder|dir|directory|path)$")

_SUB_FOLDERS = ("additional_chat_templates",)
"""Folders of a model's in which transformers look for files, too."""


def inside(folder: Path, name: str, key: str) -> Path:
    """The file or folder that a configuration in `folder` names under `key`. Raises `ModelError` for an absolute path,
    for one with "..", and for a symbolic link that leads out of the folder."""
    written = PurePosixPath(name.replace("\\", "/"))
    if written.is_absolute() or Path(name).is_absolute() or ".." in written.parts or "\0" in name:
        raise ModelError(f"'{folder}' names '{name}' for {key}, which is not inside of the folder", code="untrusted")
    if _leads_out(folder / name, folder):
        raise ModelError(f"'{folder}' names '{name}' for {key}, a link that leads out of the folder", code="untrusted")
    return folder / name


def within(path: Path, *folders: Path) -> Path:
    """`path`, a file or folder that was found in a model's folder by its name. Raises `ModelError` where it leads out
    of all `folders`, which are by default the one that it lies in, and where it is a pipe, a socket or a device."""
    if _leads_out(path, *(folders or (path.parent,))):
        raise ModelError(f"'{path}' leads out of the model's folder, to '{path.resolve()}': put the file itself there")
    if kind := special_kind(path):
        raise ModelError(f"'{path}' is {kind}: a model consists of files and folders", code="no_access")
    return path


def refuse_strangers(folder: Path) -> None:
    """Raises `ModelError` as `within` does for any file of a folder that is given to transformers or onnxruntime-genai,
    which open each name that they know. Links to folders, hidden files and graphs may lie there: they open none of
    these by its name alone."""
    try:
        for inner in (folder, *(within(folder / name, folder) for name in _SUB_FOLDERS if (folder / name).is_dir())):
            for path in sorted(inner.iterdir()):
                if not (path.name.startswith(".") or ".onnx" in path.name or stat.S_ISDIR(_mode(path))):
                    within(path, folder)
    except OSError as error:
        raise ModelError(f"cannot read the folder '{folder}': {error.strerror or error}", code="no_access") from error


def json_object(path: Path, *, largest: int = LARGEST, is_strict: bool = False) -> dict[str, Any]:
    """The object in a JSON file; with `is_strict` one that has no key twice.

    Raises `ModelError` where the file leads out of its folder, has more bytes than `largest`, holds something else, or
    is not JSON.
    """
    within(path)
    try:
        size = path.stat().st_size
        if size > largest:
            raise ModelError(f"'{path}' has {size:,} bytes: at most {largest:,} are read", code="too_large")
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, object_pairs_hook=keys_once if is_strict else None)
        if "\\ud" in text.lower():  # half of a character, which names no file
            json.dumps(value, ensure_ascii=False).encode()
    except ModelError:
        raise
    except RecursionError as error:
        raise DamagedError(f"'{path}' is not readable JSON: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise DamagedError(f"'{path}' is not readable JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise DamagedError(f"'{path}' holds a {type(value).__name__}, not a JSON object")
    return value


def refuse_names_outside(folder: Path, genai_config: Mapping[str, Any]) -> None:
    """Raises `ModelError` for a file that genai_config.json in `folder` names and that is not inside of the folder:
    onnxruntime-genai opens those of sections that this package does not know."""
    for key, name in named_files(genai_config):
        inside(folder, name, key)


def named_files(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The files that genai_config.json names, each with its dotted key; `session_options` are not looked at."""
    for key, item in (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    ):
        if isinstance(item, str) and isinstance(key, str) and _NAMES_FILE.search(key):
            yield f"{prefix}{key}", item
        elif key != "session_options":
            yield from named_files(item, f"{prefix}{key}.")


def refuse_shards_outside(folder: Path) -> None:
    """Raises `ModelError` for a file outside of `folder` that an index of a model or tokenizer in it names."""
    for pattern, key in _INDICES.items():
        for file in folder.glob(pattern):
            try:
                named = json_object(file, largest=_LARGEST_INDEX).get(key)
            except ModelError:
                continue  # whoever needs it says why it cannot be read
            names = named.values() if isinstance(named, Mapping) else named if isinstance(named, list) else ()
            for name in {name for name in names if isinstance(name, str)}:
                inside(folder, name, f"{file.name}'s {key}")


def _mode(path: Path) -> int:
    """The mode of the file at the end of all links; 0 for a file that cannot be reached, and so cannot be opened."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _leads_out(path: Path, *folders: Path) -> bool:
    if not _mode(path):
        return False
    real = path.resolve()
    return not any(real.is_relative_to(root) for folder in folders for root in _own_roots(folder.resolve()))


def _own_roots(folder: Path) -> Iterator[Path]:
    """The roots below which the files of a folder lie: the folder itself, and where it is a snapshot of Hugging Face's
    cache, or in one, the blobs of the same model."""
    yield folder
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots":
            yield above.parent.parent / "blobs"
