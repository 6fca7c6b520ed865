"""What lies in folders on disk: what is above, what Olive wrote down, where a tokenizer is.

Loads nothing and knows no ONNX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError, listed

GENAI_CONFIG = "genai_config.json"
OLIVE_RECORD = "model_config.json"
_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_PATTERNS = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_TEMPLATES = ("chat_template*", "additional_chat_templates/*")
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


def contents(folder: Path) -> str:
    """What is in `folder`, for an error message."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    return f"it holds {listed(names)}" if names else "it is empty"


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


def find_tokenizer(
    model_folder: Path,
    *,
    option: str | None = None,
    genai_config: Mapping[str, Any] | None = None,
    candidates: Iterable[tuple[str, str]] = (),
) -> tuple[str, str]:
    """Folder or hub name of the tokenizer, and the rule that found it: the option, genai_config's `tokenizer_dir`, the
    model's folder and the three above, then `candidates` (folder, file or hub name; where it comes from) in order.

    Raises `ModelError` that says where it looked.
    """
    if option is not None:
        return _from_option(option)
    places = [(str(folder), _beside(level)) for level, folder in upwards(model_folder)]
    tokenizer_dir = ((genai_config or {}).get("model") or {}).get("tokenizer_dir")
    if tokenizer_dir:
        places.insert(0, (str(model_folder / tokenizer_dir), "genai_config.json's model.tokenizer_dir"))
    others = [(str(place), origin) for place, origin in candidates]
    for place, origin in places + others:
        folder = _folder(Path(place))
        if folder is not None:
            return str(folder), origin
    for name, origin in others:
        if is_hub_name(name, needs_owner=True):
            return name, f"{origin} (a hub name)"
    looked = ", ".join(dict.fromkeys(f"'{place}'" for place, _ in places + others))
    raise ModelError(f"no tokenizer found: none of {', '.join(_MARKS)} is in {looked}; set 'tokenizer' to its folder")


def tokenizer_files(tokenizer: str) -> list[Path]:
    """The files in a tokenizer's folder that decide how text becomes tokens, by name; none for a hub name."""
    folder = Path(tokenizer)
    found = {path for pattern in (*_PATTERNS, *_TEMPLATES) for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def _from_option(option: str) -> tuple[str, str]:
    path = Path(option).expanduser()
    folder = _folder(path)
    if folder is not None:
        return str(folder), "the setting 'tokenizer'"
    if path.exists():
        raise ModelError(f"'tokenizer' = '{option}' has none of {', '.join(_MARKS)}")
    if is_hub_name(option):
        return option, "the setting 'tokenizer' (a hub name)"
    raise ModelError(f"'tokenizer' = '{option}' does not exist")


def _folder(path: Path) -> Path | None:
    if path.is_file():
        path = path.parent
    return path.resolve() if any((path / mark).is_file() for mark in _MARKS) else None


def _beside(level: int) -> str:
    return "beside the model" if level == 0 else f"{level} folder{'s' if level > 1 else ''} above the model"
