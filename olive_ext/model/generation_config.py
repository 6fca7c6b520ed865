"""What a model's configurations say of how it writes: the ids that they name, and tokens that it never writes. Knows no
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from olive_ext.model.package_config import GenerationConfig, read_json
from olive_ext.model.types import ModelFiles


@dataclass(frozen=True)
class Suppressed:
    """Tokens that are never generated (`everywhere`), or not as the first (`at_first`): as transformers does with
    Whisper's `suppress_tokens` and `begin_suppress_tokens`."""

    everywhere: tuple[int, ...] = ()
    at_first: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.everywhere or self.at_first)

    @property
    def bans(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that a row of logits must not give, by `engine.step.Ban`; empty where no row has such."""
        return ((), self.everywhere, self.everywhere + self.at_first) if self else ()


def read_suppressed(files: ModelFiles) -> Suppressed:
    """`suppress_tokens` and `begin_suppress_tokens` of a model's configurations."""
    keys = ("suppress_tokens", "begin_suppress_tokens")
    return Suppressed(*(tuple(map(int, first_named(key, files))) for key in keys))


def first_named(key: str, files: ModelFiles) -> Sequence[Any]:
    """The ids under `key` in the first file that has it. Each may hold one id or a list; empty where none has any."""
    named = _first(key, files)
    return () if named is None else [named] if isinstance(named, int) else list(named)


def named_ids(key: str, files: ModelFiles) -> Mapping[str, int]:
    """The ids by name under `key` in the first file that has it; empty where none has any."""
    return _first(key, files) or {}


def _first(key: str, files: ModelFiles) -> Any:
    """What genai_config.json, then generation_config.json and config.json in the model's folder have under `key`."""
    places = (files.directory / "generation_config.json", files.directory / "config.json")
    written = (read_json(path, GenerationConfig) for path in places if path.is_file())
    sections = ((files.genai_config.get("model") or {}), *written)
    return next((section[key] for section in sections if section.get(key) is not None), None)
