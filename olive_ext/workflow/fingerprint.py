"""What decides an evaluation's numbers besides the recipe, as a digest for Olive's caches.

Olive keys its caches to the recipe and to a part of the model's files only. Knows no cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from olive_ext.backends.package_versions import versions
from olive_ext.config import EvaluationSettings, ReferenceConfig
from olive_ext.errors import ModelError
from olive_ext.model import content_hash, locate
from olive_ext.workflow.handlers import tokenizer_candidates
from olive_ext.workflow.input_model import settled

_TASK_FILES = (".yaml", ".yml")
_DIGEST_BYTES = 8
_CHUNK_BYTES = 1 << 24


def environment(settings: EvaluationSettings) -> str:
    """Digest (16 hex digits) of the versions in use, and of the task files, adapters and reference that the settings
    name.

    Files count by size and time of change, since data sets lie among them; those of the reference by their content.
    """
    adapters = (path for path in map(Path, settings.engine.adapters) if path.is_file())
    paths = sorted({*_task_files(settings), *adapters})
    files = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]
    reference = [] if settings.reference is None else [_reference(settled(settings.reference))]
    return digest({"versions": versions(), "files": files, "reference": reference})


def missed_files(model_type: str, model_config: dict[str, Any], settings: EvaluationSettings) -> str:
    """Digest of the model's files where Olive's model id leaves most of them out: an ONNX model given as a file.

    Empty for other models, and where the files cannot be found: the evaluation then says so itself.
    """
    path, tokenizer = model_config.get("model_path"), settings.tokenizer
    if model_type.lower() != "onnxmodel" or not isinstance(path, str) or not Path(path).is_file():
        return ""
    try:
        candidates = tokenizer_candidates(model_config.get("model_attributes"))
        return content_hash(locate(path, tokenizer=tokenizer, extra_tokenizer_candidates=candidates))
    except ModelError:
        return ""


def _reference(reference: ReferenceConfig) -> list[Any]:
    """The reference's settings and its content, wherever it lies; of a model on the hub, which revision is here."""
    settings = reference.model_dump(mode="json", exclude={"path", "records_dir"})
    path = Path(reference.path)
    if not path.exists():
        return [settings, reference.path, _snapshot(reference.path)]
    folder = path if path.is_dir() else path.parent
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return [settings, _content(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))]


@lru_cache(maxsize=8)
def _content(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Digest of the files' names and bytes (about 1 s/GB); asked again for each pass and candidate."""
    found = hashlib.sha256()
    for path, size, _ in files:
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
    return found.hexdigest()[: 2 * _DIGEST_BYTES]


def _snapshot(name: str) -> str:
    """Where the hub's cache has the model's config.json: the revision is part of the path. Empty where it has none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return found if isinstance(found, str) else ""


def deciding(values: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Settings as written, less those that change no number: bounds, the folder of the records, and `without`.

    Olive makes folders absolute once they exist, so that they would also make a second run unlike the first.
    """
    kept = {name: value for name, value in values.items() if name != "require" and name not in without}
    if isinstance(kept.get("reference"), Mapping):
        kept["reference"] = {name: value for name, value in kept["reference"].items() if name != "records_dir"}
    return kept


def digest(value: Any) -> str:
    """16 hex digits of anything that JSON can say."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _task_files(settings: EvaluationSettings) -> Iterator[Path]:
    written = settings.include_path or []
    for folder in [written] if isinstance(written, str) else written:
        yield from _files(Path(folder), "**/*")
    for task in settings.tasks:
        if isinstance(task, str) and task.lower().endswith(_TASK_FILES):
            yield from _files(Path(task).parent, "*")


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    return (path for path in folder.glob(pattern) if path.is_file() and "__pycache__" not in path.parts)
