"""The JSON files of a model's folder: what this package reads of them, with the type of each value. Knows no graph.

A file may hold more than is declared here: other programs read it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool

from olive_ext.config.base import Strict, not_bool
from olive_ext.errors import ConfigError, DamagedError
from olive_ext.model.files.package_files import json_object
from olive_ext.model.types import ModelFiles

LONGEST = 2**31 - 1
"""Positions of a context, which kernels count in 32 bits."""

LARGEST_VOCABULARY = 2**24
"""Tokens; the largest vocabulary that is published has a million."""

LARGEST_SIZE = 2**20
"""Heads, numbers of a head or a layer, and layers."""


def _number(value: Any) -> Any:
    """Refuses texts, too: what is read later is the file's own value, and not pydantic's."""
    if isinstance(value, str):
        raise ValueError("a text is no number")
    return not_bool(value)


Names = dict[str, str]
Id = Annotated[int, Field(ge=-(2**31), lt=2**31), BeforeValidator(_number)]
Ids = Annotated[Id | list[Id], Field(description="an integer or a list of integers, of 32 bits each")]
Length = Annotated[int, Field(ge=1, le=LONGEST), BeforeValidator(_number)]
Vocabulary = Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY), BeforeValidator(_number)]
Size = Annotated[int, Field(ge=-LARGEST_SIZE, le=LARGEST_SIZE), BeforeValidator(_number)]
"""-42 in mobius' packages of models without attention."""

PositiveSize = Annotated[int, Field(ge=1, le=LARGEST_SIZE), BeforeValidator(_number)]
Window = Annotated[int, Field(ge=-1, le=LONGEST), BeforeValidator(_number)]


class ConfigSection(Strict):
    """A part of a file; keys that are not declared stay unread."""

    model_config = ConfigDict(extra="allow")


class _Stage(ConfigSection):
    filename: str | None = None


class _Graph(_Stage):
    inputs: Names | None = None
    outputs: Names | None = None


class _SessionOptions(ConfigSection):
    provider_options: list[dict[str, dict[str, Any] | None]] | None = None
    custom_ops_library: str | None = None


class _SlidingWindow(ConfigSection):
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


class _Model(ConfigSection):
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


class _Search(ConfigSection):
    repetition_penalty: Annotated[float, BeforeValidator(_number)] | None = None
    min_length: Id | None = None
    max_length: Id | None = None
    no_repeat_ngram_size: Id | None = None
    do_sample: StrictBool | None = None


class GenaiConfig(ConfigSection):
    """genai_config.json."""

    model: _Model | None = None
    search: _Search | None = None


class _TextConfig(ConfigSection):
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


class _Variant(ConfigSection):
    variant_directory: str | None = None
    ep: str | None = None
    executor_info: dict[str, str | dict[str, Any]] | None = None


class ComponentFile(ConfigSection):
    """component.json of a model package."""

    variants: dict[str, _Variant] | None = None


class Manifest(ConfigSection):
    """manifest.json of a model package."""

    schema_version: str | int | None = None
    components: dict[str, str | ComponentFile] | None = None
    shared_assets: Names | None = None


def read_json(path: Path, form: type[ConfigSection] | None = None) -> Mapping[str, Any]:
    """The object in a JSON file; a key whose value is null counts as not written.

    Raises `ModelError` as `json_object` does, and where a value is not of the type that `form` declares: with the key,
    the value and what is accepted.
    """
    written = _without_null(json_object(path, is_strict=form is GenaiConfig))
    if form is not None:
        with mistakes_in(path):
            form.parse(written)
    return written


@contextmanager
def mistakes_in(file: Path) -> Iterator[None]:
    """A mistake in what the file holds is a `ModelError` that names it."""
    try:
        yield
    except ConfigError as error:
        raise DamagedError(f"'{file}': {error}") from error


def _without_null(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_null(item) if isinstance(item, dict) else item for key, item in value.items() if item is not None
    }


class GenerationConfig(_Search):
    """generation_config.json of a Hugging Face model."""

    eos_token_id: Ids | None = None
    decoder_start_token_id: Ids | None = None
    suppress_tokens: list[Id] | None = None
    begin_suppress_tokens: list[Id] | None = None
    lang_to_id: dict[str, Id] | None = None
    task_to_id: dict[str, Id] | None = None
    forced_decoder_ids: list[Annotated[list[Id | None], Field(min_length=2, max_length=2)]] | None = None
    no_timestamps_token_id: Id | None = None


@dataclass(frozen=True)
class Suppressed:
    """Tokens that are never generated, or not as the first: as transformers does with Whisper's."""

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


def named_ends(files: ModelFiles) -> dict[str, Sequence[int]]:
    """`eos_token_id` by file, first the one that a model's runtime reads: genai_config.json, generation_config.json or
    config.json. A config.json that names no id decides nothing: transformers write into it only what differs from a
    class's defaults."""
    sections = _sections(files)
    if "eos_token_id" not in sections.get("config.json", {}):
        sections.pop("config.json", None)
    ids = {file: section.get("eos_token_id", ()) for file, section in sections.items()}
    return {file: [named] if isinstance(named, int) else list(named) for file, named in ids.items()}


def _first(key: str, files: ModelFiles) -> Any:
    return next((section[key] for section in _sections(files).values() if section.get(key) is not None), None)


def _sections(files: ModelFiles) -> dict[str, Mapping[str, Any]]:
    """What a model's configurations say of generation, by file, first what a model's runtime reads."""
    paths = (files.directory / "generation_config.json", files.directory / "config.json")
    written = {path.name: read_json(path, GenerationConfig) for path in paths if path.is_file()}
    genai = {"genai_config.json": files.genai_config.get("model", {})} if files.genai_config else {}
    return {**genai, **written}


def input_window(files: ModelFiles) -> int:
    """Tokens that a graph of static shape takes (0: any); `slide_inputs` is true where it is not written."""
    window = (files.genai_config.get("model") or {}).get("decoder", {}).get("sliding_window") or {}
    return int(window.get("window_size", 0)) if window.get("slide_inputs", True) else 0
