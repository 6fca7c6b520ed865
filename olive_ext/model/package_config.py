"""The JSON files of a model's folder: what this package reads of them, with the type of each value, and the names of
other files in them. Knows no graph.

A file may hold more than is declared here: other programs read it, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from olive_ext.config.base import Int, Strict, not_bool
from olive_ext.errors import ConfigError, ModelError, first_line
from olive_ext.model.package_files import inside, within

LARGEST = 16 * 2**20
"""Bytes of a configuration; chat templates, the longest part of any, have some ten thousand."""

LONGEST = 2**31 - 1
"""Positions of a context, which kernels count in 32 bits."""

LARGEST_VOCABULARY = 2**24
"""Tokens; the largest vocabulary that is published has a million."""

LARGEST_SIZE = 2**20
"""Heads, numbers of a head or a layer, and layers."""

_LARGEST_INDEX = 2**28
"""Bytes of an index of weights: some hundred for each tensor, of which models of experts have 200,000."""

_INDICES = {"*.index.json": "weight_map", "tokenizer_config.json": "fast_tokenizer_files"}
"""Files of a Hugging Face model that name others, and the key under which they do."""

_NAMES_FILE = re.compile(r"(file|filename|folder|dir|directory|path)$")

Names = dict[str, str]
Id = Annotated[Int, Field(ge=-(2**31), lt=2**31)]
Ids = Annotated[Id | list[Id], Field(description="an integer or a list of integers, of 32 bits each")]
Length = Annotated[int, Field(ge=1, le=LONGEST), BeforeValidator(not_bool)]
Vocabulary = Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY), BeforeValidator(not_bool)]
Size = Annotated[int, Field(ge=-LARGEST_SIZE, le=LARGEST_SIZE), BeforeValidator(not_bool)]
"""-42 in mobius' packages of models without attention."""

PositiveSize = Annotated[int, Field(ge=1, le=LARGEST_SIZE), BeforeValidator(not_bool)]
Window = Annotated[int, Field(ge=-1, le=LONGEST), BeforeValidator(not_bool)]


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
    window_size: Window | None = None
    slide_inputs: bool | None = None


class _Decoder(_Graph):
    head_size: Size | None = None
    num_key_value_heads: Size | None = None
    num_attention_heads: Size | None = None
    num_hidden_layers: PositiveSize | None = None
    hidden_size: PositiveSize | None = None
    sliding_window: _SlidingWindow | None = None
    session_options: _SessionOptions | None = None
    pipeline: list[dict[str, _Stage]] | None = None


class _Model(_Section):
    type: str | None = None
    context_length: Length | None = None
    vocab_size: Vocabulary | None = None
    eos_token_id: Ids | None = None
    bos_token_id: Id | None = None
    pad_token_id: Id | None = None
    decoder_start_token_id: Ids | None = None
    tokenizer_dir: str | None = None
    decoder: _Decoder | None = None
    embedding: _Graph | None = None
    encoder: _Graph | None = None


class GenaiConfig(_Section):
    """genai_config.json."""

    model: _Model | None = None


class _TextConfig(_Section):
    vocab_size: Vocabulary | None = None
    max_position_embeddings: Length | None = None
    max_target_positions: Length | None = None
    n_positions: Length | None = None
    n_ctx: Length | None = None
    max_seq_len: Length | None = None
    seq_length: Length | None = None
    max_sequence_length: Length | None = None
    sliding_window: Window | None = None


class HfConfig(_TextConfig):
    """config.json of a Hugging Face model."""

    text_config: _TextConfig | None = None
    eos_token_id: Ids | None = None
    decoder_start_token_id: Ids | None = None


class GenerationConfig(_Section):
    """generation_config.json of a Hugging Face model."""

    eos_token_id: Ids | None = None
    decoder_start_token_id: Ids | None = None
    suppress_tokens: list[Id] | None = None
    begin_suppress_tokens: list[Id] | None = None
    lang_to_id: dict[str, Id] | None = None
    task_to_id: dict[str, Id] | None = None
    forced_decoder_ids: list[Annotated[list[Id | None], Field(min_length=2, max_length=2)]] | None = None
    no_timestamps_token_id: Id | None = None


def read_json(path: Path, form: type[_Section] | None = None, *, largest: int = LARGEST) -> Mapping[str, Any]:
    """The object in a JSON file; a key whose value is null counts as not written.

    Raises `ModelError` where the file leads out of its folder, holds something else, is not JSON, or where a value is
    not of the type that `form` declares: with the key, the value and what is accepted.
    """
    within(path)
    try:
        size = path.stat().st_size
        if size > largest:
            raise ModelError(f"'{path}' has {size:,} bytes: no configuration has more than {largest:,}")
        value = json.loads(
            path.read_text(encoding="utf-8-sig"), object_pairs_hook=keys_once if form is GenaiConfig else None
        )
    except RecursionError as error:
        raise ModelError(f"'{path}' is not readable JSON: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is not readable JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"'{path}' holds a {type(value).__name__}, not a JSON object")
    written = _without_null(value)
    if form is not None:
        try:
            form.parse(written)
        except ConfigError as error:
            raise ModelError(f"'{path}': {error}") from error
    return written


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `object_pairs_hook`. Raises `ValueError` for a key that is there twice: Python takes the last
    value, others the first, and onnxruntime-genai obeys both."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in names if names.count(key) > 1)}' is there twice")
    return found


def _without_null(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_null(item) if isinstance(item, dict) else item for key, item in value.items() if item is not None
    }


def refuse_names_outside(folder: Path, genai_config: Mapping[str, Any]) -> None:
    """Raises `ModelError` for a file that genai_config.json in `folder` names and that is not inside of the folder:
    onnxruntime-genai opens those of sections that this package does not know."""
    for key, name in _named_files(genai_config, ""):
        inside(folder, name, key)


def _named_files(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Key and name of each file; settings of sessions and providers are `package_trust`'s."""
    for key, item in (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    ):
        if isinstance(item, str) and isinstance(key, str) and _NAMES_FILE.search(key):
            yield f"{place}{key}", item
        elif key != "session_options":
            yield from _named_files(item, f"{place}{key}.")


def refuse_shards_outside(folder: Path) -> None:
    """Raises `ModelError` for a file that an index of a Hugging Face model or tokenizer in `folder` names and that is
    not inside of the folder."""
    for pattern, key in _INDICES.items():
        for file in folder.glob(pattern):
            try:
                named = read_json(file, largest=_LARGEST_INDEX).get(key)
            except ModelError:
                continue  # whoever needs it says why it cannot be read
            names = named.values() if isinstance(named, Mapping) else named if isinstance(named, list) else ()
            for name in {name for name in names if isinstance(name, str)}:
                inside(folder, name, f"{file.name}'s {key}")
