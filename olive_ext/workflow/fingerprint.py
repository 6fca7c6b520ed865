"""What decides an evaluation's numbers besides the recipe, as a digest for Olive's caches.

Olive keys its caches to the recipe and to a part of the model's files only. Knows no cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from olive_ext.backends.versions import versions
from olive_ext.config import EvaluationSettings
from olive_ext.errors import ModelError
from olive_ext.model import content_hash, locate
from olive_ext.workflow.handlers import tokenizer_candidates

_TASK_FILES = (".yaml", ".yml")
_DIGEST_BYTES = 8


def environment(settings: EvaluationSettings) -> str:
    """Digest (16 hex digits) of the versions in use, and of the task files and adapters that the settings name.

    Files count by size and time of change: data sets lie among them.
    """
    adapters = (path for path in map(Path, settings.engine.adapters) if path.is_file())
    paths = sorted({*_task_files(settings), *adapters})
    files = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]
    return digest({"versions": versions(), "files": files})


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
