"""Small questions about folders on disk: what lies above, what is in there, what Olive wrote down. Knows no ONNX."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError

GENAI_CONFIG = "genai_config.json"
OLIVE_RECORD = "model_config.json"
_LEVELS_UP = 3
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def real_path(path: str | Path) -> Path:
    """`path` as an absolute path with its folders resolved. A symlinked *file* keeps its name: in a Hugging Face cache
    the names lie in the links and the blobs have none. Raises `ModelError` where there is nothing."""
    expanded = Path(path).expanduser()
    if not expanded.exists():
        reason = "is a broken symbolic link" if expanded.is_symlink() else "does not exist"
        raise ModelError(f"model path '{path}' {reason}")
    return expanded.resolve() if expanded.is_dir() else expanded.parent.resolve() / expanded.name


def upwards(folder: Path) -> Iterator[tuple[int, Path]]:
    """`folder` and the three folders above it, each with its distance."""
    yield 0, folder
    yield from enumerate(folder.parents[:_LEVELS_UP], start=1)


def contents(folder: Path, most: int = 8) -> str:
    """What is in `folder`, for an error message."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    if not names:
        return "it is empty"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"it holds {', '.join(names[:most])}{more}"


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; raises `ModelError` where it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"'{path}' holds a {type(value).__name__}, not a JSON object")
    return value


def is_hub_name(name: str, *, needs_owner: bool = False) -> bool:
    """True for what may be a model on the Hugging Face hub ("owner/name", or "name") and is no path here: a mistyped
    path into a folder that exists is a mistyped path."""
    if not _HUB_NAME.fullmatch(name) or name.endswith(".onnx") or Path(name).exists():
        return False
    owner, slash, _ = name.partition("/")
    return not Path(owner).is_dir() if slash else not needs_owner


def olive_record(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Type (in lower case) and config of the model that Olive saved in `folder`; ("", {}) where it saved none."""
    path = folder / OLIVE_RECORD
    record = read_json(path) if path.is_file() else {}
    kind, config = record.get("type"), record.get("config")
    return (kind.lower(), config) if isinstance(kind, str) and isinstance(config, dict) else ("", {})
