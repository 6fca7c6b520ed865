"""The JSON files of a model's folder: what this package reads of them, with the type of each value, and the files that
they name, which stay inside of the folder. Knows no graph.

A file may hold more than is declared here: other programs read it, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from olive_ext.config.base import Int, PositiveInt, Strict
from olive_ext.errors import ConfigError, ModelError

LARGEST = 16 * 2**20
"""Bytes of a configuration; chat templates, the longest part of any, have some ten thousand."""

Names = dict[str, str]
Ids = Int | list[Int]
NonNegativeIds = Annotated[Ids, Field(description="an integer or a list of integers")]


class _Section(Strict):
    """A part of a file; keys that are not declared stay unread."""

    model_config = ConfigDict(extra="allow")


class _Stage(_Section):
    filename: str | None = None


class _Graph(_Stage):
    inputs: Names | None = None
    outputs: Names | None = None


class _SessionOptions(_Section):
    provider_options: list[dict[str, dict[str, Any] | None]] | None = None
    custom_ops_library: str | None = None


class _SlidingWindow(_Section):
    window_size: Int | None = None
    slide_inputs: bool | None = None


class _Decoder(_Graph):
    head_size: Int | None = None
    num_key_value_heads: Int | None = None
    num_attention_heads: Int | None = None
    """These three are -42 in mobius' packages of models without attention."""

    num_hidden_layers: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    sliding_window: _SlidingWindow | None = None
    session_options: _SessionOptions | None = None
    pipeline: list[dict[str, _Stage]] | None = None


class _Model(_Section):
    type: str | None = None
    context_length: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    eos_token_id: NonNegativeIds | None = None
    bos_token_id: Int | None = None
    pad_token_id: Int | None = None
    decoder_start_token_id: NonNegativeIds | None = None
    tokenizer_dir: str | None = None
    decoder: _Decoder | None = None
    embedding: _Graph | None = None
    encoder: _Graph | None = None


class GenaiConfig(_Section):
    """genai_config.json."""

    model: _Model | None = None


class _TextConfig(_Section):
    vocab_size: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    max_target_positions: PositiveInt | None = None
    n_positions: PositiveInt | None = None
    sliding_window: Int | None = None


class HfConfig(_TextConfig):
    """config.json of a Hugging Face model."""

    text_config: _TextConfig | None = None
    eos_token_id: NonNegativeIds | None = None
    decoder_start_token_id: NonNegativeIds | None = None


class GenerationConfig(_Section):
    """generation_config.json of a Hugging Face model."""

    eos_token_id: NonNegativeIds | None = None
    decoder_start_token_id: NonNegativeIds | None = None
    suppress_tokens: list[Int] | None = None
    begin_suppress_tokens: list[Int] | None = None
    lang_to_id: dict[str, Int] | None = None
    task_to_id: dict[str, Int] | None = None
    no_timestamps_token_id: Int | None = None


def read_json(path: Path, form: type[_Section] | None = None) -> Mapping[str, Any]:
    """The object in a JSON file; a key whose value is null counts as not written.

    Raises `ModelError` where the file holds something else, is not JSON, or where a value is not of the type that
    `form` declares: with the key, the value and what is accepted.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ModelError(f"'{path}' has {size:,} bytes: no configuration has more than {LARGEST:,}")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise ModelError(f"'{path}' is not readable JSON: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"'{path}' holds a {type(value).__name__}, not a JSON object")
    written = _without_null(value)
    if form is not None:
        try:
            form.parse(written)
        except ConfigError as error:
            raise ModelError(f"'{path}': {error}") from error
    return written


def _without_null(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_null(item) if isinstance(item, dict) else item for key, item in value.items() if item is not None
    }


def inside(folder: Path, name: str, key: str) -> Path:
    """The file or folder that a configuration in `folder` names under `key`. Raises `ModelError` for an absolute path,
    for one with "..", and for a symbolic link that leads out of the folder; the links of Hugging Face's cache stay
    in the model's own blobs."""
    written = PurePosixPath(name.replace("\\", "/"))
    if written.is_absolute() or Path(name).is_absolute() or ".." in written.parts or "\0" in name:
        raise ModelError(
            f"'{folder}' names '{name}' for {key}, which is not inside of the folder: no model names other files"
        )
    path, root = folder / name, folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if path.exists() and not any(path.resolve().is_relative_to(place) for place in roots):
        raise ModelError(
            f"'{folder}' names '{name}' for {key}, a link that leads out of the folder, to '{path.resolve()}'"
        )
    return path


def custom_operators_of(genai_config: Any) -> str | None:
    """The library of operators that any section of genai_config.json names; None where there is none."""
    if isinstance(genai_config, list):
        return next(filter(None, map(custom_operators_of, genai_config)), None)
    if not isinstance(genai_config, Mapping):
        return None
    own = genai_config.get("custom_ops_library")
    return str(own) if own else custom_operators_of(list(genai_config.values()))
