"""What a model is made of, as one digest and one size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from olive_ext.model.tokenizer_folder import tokenizer_files
from olive_ext.model.types import ModelFiles

_CHUNK_BYTES = 1 << 24
_HF_FILES = ("config.json", "*.safetensors", "*.bin", "tokenizer*", "vocab*", "merges.txt")
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


def _add(update: Update, label: str, content: bytes) -> None:
    update(f"{label} {len(content)}\n".encode())
    update(content)


def _add_file(update: Update, label: str, path: Path) -> None:
    update(f"{label} {path.stat().st_size}\n".encode())
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            update(buffer[:count])
