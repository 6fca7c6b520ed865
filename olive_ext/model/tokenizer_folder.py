"""Finds the folder of a model's tokenizer. Loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError
from olive_ext.model.folders import is_hub_name, upwards

_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_PATTERNS = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_TEMPLATES = ("chat_template*", "additional_chat_templates/*")


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
