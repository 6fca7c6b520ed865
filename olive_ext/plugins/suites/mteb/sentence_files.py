"""What a model's sentence-transformers files say: pooling, prompts, length, a reranker's answers. Knows no graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olive_ext.errors import DamagedError, ModelError
from olive_ext.model.files.package_config import read_json

_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True)
class SentenceFiles:
    """None of a field where the files do not say."""

    pooling: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    """The prompt of texts that are neither queries nor documents, where a task has none of its own."""

    max_length: int | None = None
    answers: tuple[int, int] | None = None
    """Tokens of a reranker's "yes" and "no"."""


def read_sentence_files(folders: tuple[Path, ...]) -> SentenceFiles:
    """The files of the first of `folders` that has modules.json. Raises `ModelError` for layers besides pooling,
    normalization and the scores of two answers, and for poolings of other kinds."""
    folder = next((folder for folder in folders if (folder / "modules.json").is_file()), None)
    if folder is None:
        return SentenceFiles()
    pooling = answers = None
    for module in _modules(folder / "modules.json"):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            file = folder / str(module.get("path", "")) / "config.json"
            pooling = _pooling(read_json(file), file)
        elif kind == "LogitScore":
            file = folder / str(module.get("path", "")) / "config.json"
            answers = _answers(read_json(file), file)
        elif kind not in ("Transformer", "Normalize"):
            raise ModelError(f"'{folder / 'modules.json'}' has a layer '{kind}', which is not run here")
    names = "config_sentence_transformers.json", "sentence_bert_config.json"
    config, bert = (read_json(folder / name) if (folder / name).is_file() else {} for name in names)
    prompts = {str(name): text for name, text in (config.get("prompts") or {}).items() if text}
    if bert.get("do_lower_case") is True:
        raise ModelError(f"'{folder / names[1]}' lowers texts ('do_lower_case' = true), which is not run here")
    default = config.get("default_prompt_name")
    if default is not None and default not in (config.get("prompts") or {}):
        raise ModelError(f"'{folder / names[0]}' has no prompt of its 'default_prompt_name' = {default!r}")
    length = bert.get("max_seq_length")
    return SentenceFiles(pooling, prompts, default, length if isinstance(length, int) else None, answers)


def _modules(file: Path) -> list[Mapping[str, Any]]:
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"'{file}' cannot be read: {error}", code="no_access") from error
    if not isinstance(modules, list) or not all(isinstance(module, Mapping) for module in modules):
        raise DamagedError(f"'{file}' is no list of modules")
    return modules


def _answers(config: Mapping[str, Any], file: Path) -> tuple[int, int]:
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(yes, int) or not isinstance(no, int):
        raise ModelError(f"'{file}' scores one answer: those with 'true_token_id' and 'false_token_id' are run")
    return yes, no


def _pooling(config: Mapping[str, Any], file: Path) -> str:
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or ())
    modes = [_NAMES.get(mode, mode) for mode in modes]
    modes += [_POOLINGS.get(key, key) for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _NAMES.values():
        raise ModelError(
            f"'{file}' asks for the pooling {' and '.join(modes) or 'none'}: mean, cls or last token is run"
        )
    if config.get("include_prompt") is False and modes[0] == "mean":
        raise ModelError(f"'{file}' leaves prompts out of the mean ('include_prompt' = false), which is not run here")
    return modes[0]
