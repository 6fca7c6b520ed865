"""What a model is made of on disk: its weights, one digest and one size. Reads no graph: it is given the locations.

ONNX Runtime takes a graph from memory together with one folder, and refuses every location that leaves this folder,
also through a symbolic link. In a Hugging Face cache every file is such a link (snapshots/<rev>/model.onnx.data ->
blobs/<hash>). So links are resolved here, the folder becomes the deepest one that holds all the real files, and the
locations are rewritten relative to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from olive_ext.errors import ModelError
from olive_ext.model.folders import tokenizer_files
from olive_ext.model.types import ModelFiles

_CHUNK_BYTES = 1 << 24
_HF_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files that a Hugging Face model's weights are in."""

_HF_FILES = ("config.json", *_HF_WEIGHTS, "*.bin", "tokenizer*", "vocab*", "merges.txt")
"""All that may decide a Hugging Face model's numbers."""

Update = Callable[[bytes | memoryview], object]


def content_hash(files: ModelFiles) -> str:
    """Digest (32 hex digits) of everything that decides a model's numbers: graph, external data, genai_config.json's
    `model`, tokenizer and chat template. The same wherever the files lie; reads all of them (about 1 s/GB)."""
    digest = hashlib.sha256()  # twice as fast as blake2b where the processor has instructions for it
    _add(digest.update, "genai_config", json.dumps(files.genai_config.get("model"), sort_keys=True).encode())
    _add_file(digest.update, "decoder", files.decoder)
    for index, path in enumerate(files.weights):
        _add_file(digest.update, f"weights {index}", path)
    for part, companion in files.companions.items():
        for index, path in enumerate((companion.graph, *companion.weights)):
            _add_file(digest.update, f"{part} {index}", path)
    token_files = tokenizer_files(files.tokenizer)
    for path in token_files:
        _add_file(digest.update, f"tokenizer {path.name}", path)
    if not token_files:
        _add(digest.update, "tokenizer", files.tokenizer.encode())
    return digest.hexdigest()[:32]


def hf_content_hash(folder: Path) -> str:
    """Digest (32 hex digits) of a Hugging Face model's weights, configuration and tokenizer in `folder`."""
    digest = hashlib.sha256()
    files = {path for pattern in _HF_FILES for path in folder.glob(pattern)}
    for path in sorted(files):
        _add_file(digest.update, path.name, path)
    return digest.hexdigest()[:32]


def size_on_disk(files: ModelFiles) -> int:
    """Bytes of the graphs that run and their external data."""
    companions = (path for part in files.companions.values() for path in (part.graph, *part.weights))
    return sum(
        path.stat().st_size for path in {path.resolve() for path in (files.decoder, *files.weights, *companions)}
    )


def hf_weights(folder: Path) -> list[Path]:
    """The weight files of the Hugging Face model in `folder`; none where it is only known by name."""
    return sorted(file for pattern in _HF_WEIGHTS for file in folder.glob(pattern))


def weight_files(decoder: Path, locations: Iterable[str]) -> dict[str, Path]:
    """Location -> file, as named, for each external-data location in `decoder`, sorted.

    A location is looked up beside the decoder, then beside the file that a symbolic link `decoder` points to. Raises
    `ModelError` that names the missing file, or a location outside the model's folder.
    """
    found = {}
    for location in sorted(set(locations)):
        relative = PurePosixPath(os.path.normpath(location).replace("\\", "/"))
        if relative.is_absolute() or relative.parts[:1] == ("..",):
            raise ModelError(f"'{decoder}' keeps weights in '{location}', outside its own folder")
        places = (decoder.parent / relative, decoder.resolve().parent / relative)
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise ModelError(f"'{decoder}' keeps weights in '{location}', and '{places[0]}' does not exist")
        found[location] = file
    return found


def external_data_plan(decoder: Path, locations: Iterable[str]) -> tuple[Path, dict[str, str]]:
    """The folder to open `decoder` from memory with, and new location by old one for those that change.

    Raises `ModelError` as `weight_files` does, and where the files lie on different drives.
    """
    files = {location: file.resolve() for location, file in weight_files(decoder, locations).items()}
    if not files:
        return decoder.resolve().parent, {}
    try:
        folder = Path(os.path.commonpath([file.parent for file in files.values()]))
    except ValueError as error:
        raise ModelError(f"the weights of '{decoder}' lie on different drives") from error
    moved = {location: file.relative_to(folder).as_posix() for location, file in files.items()}
    return folder, {old: new for old, new in moved.items() if old != new}


def _add(update: Update, label: str, content: bytes) -> None:
    update(f"{label} {len(content)}\n".encode())
    update(content)


def _add_file(update: Update, label: str, path: Path) -> None:
    update(f"{label} {path.stat().st_size}\n".encode())
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            update(buffer[:count])
