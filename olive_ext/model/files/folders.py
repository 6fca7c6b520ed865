"""Paths that users write, and what Olive wrote down in a folder. Loads no model and knows no ONNX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError, NotFoundError, listed, special_kind
from olive_ext.model.files.package_config import read_json
from olive_ext.model.types import ModelFiles

GENAI_CONFIG = "genai_config.json"
OLIVE_RECORD = "model_config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

MEDIA_SECTIONS = {"vision": "vision", "speech": "audio"}
"""Sections of genai_config.json whose graph only pictures or sound need, and the part's name here."""


def real_path(path: str | Path) -> Path:
    """`path` as an absolute path with its folders resolved. A symlinked *file* keeps its name: in a Hugging Face cache
    the names lie in the links and the blobs have none. Raises `ModelError` where there is nothing."""
    expanded = Path(path).expanduser()
    if not expanded.exists():
        reason = "is a broken symbolic link" if expanded.is_symlink() else "does not exist"
        raise NotFoundError(f"model path '{path}' {reason}")
    if kind := special_kind(expanded):
        raise ModelError(f"model path '{path}' is {kind}: give a file or a folder", code="no_access")
    return expanded.resolve() if expanded.is_dir() else expanded.parent.resolve() / expanded.name


def contents(folder: Path) -> str:
    """What is in `folder`, for an error message."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    return f"it holds {listed(names)}" if names else "it is empty"


def is_hub_name(name: str, *, needs_owner: bool = False) -> bool:
    """True for what may be a model on the Hugging Face hub ("owner/name", or "name") and is no path here: a mistyped
    path into a folder that exists is a mistyped path."""
    if not _HUB_NAME.fullmatch(name) or name.endswith(".onnx") or Path(name).exists():
        return False
    owner, slash, _ = name.partition("/")
    return not Path(owner).is_dir() if slash else not needs_owner


def why_missing(kind: str, path: Any, onnx_file_name: str | None) -> str:
    """Why a recipe's input model, of Olive's type `kind` in lower case, is not there; empty where it is, or may be.

    Olive takes a path that does not exist for a name on the hub, and looks there.
    """
    if not isinstance(path, str) or path.startswith("azureml:"):
        return ""
    if not Path(path).exists() and (kind == "onnxmodel" or not is_hub_name(path)):
        return f"'input_model.model_path' = '{path}': no such file or folder"
    if onnx_file_name and Path(path).is_dir() and not (Path(path) / onnx_file_name).is_file():
        return f"'input_model.onnx_file_name' = '{onnx_file_name}' is not in '{path}': {contents(Path(path))}"
    return ""


def olive_record(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Type (in lower case) and config of the model that Olive saved in `folder`; ("", {}) where it saved none."""
    path = folder / OLIVE_RECORD
    record = read_json(path) if path.is_file() else {}
    kind, config = record.get("type"), record.get("config")
    return (kind.lower(), config) if isinstance(kind, str) and isinstance(config, dict) else ("", {})


def missing_encoder(files: ModelFiles) -> str:
    """Which encoder that genai_config.json names does not exist, and nothing else stands for; empty for none."""
    for section, part in MEDIA_SECTIONS.items():
        name = (files.genai_config.get("model", {}).get(section) or {}).get("filename")
        if name and part not in files.companions:
            file = files.directory / name
            return f"genai_config.json names '{name}' for model.{section}.filename; '{file}' does not exist"
    return ""


def is_same_path(one: str, other: str) -> bool:
    """Whether two paths, or names of models that are not here, mean one file or folder, through links, too."""
    first, second = Path(one), Path(other)
    return first == second or (first.exists() and second.exists() and first.samefile(second))
