"""A model's folder: which of its files this package may open, its JSON files with the type of each value that is read,
the paths that users write, and what Olive recorded. Knows no graph.

A JSON file may hold more than is declared here, because other programs read it, too. A file belongs to the folder if,
after all symbolic links are followed, it lies in the folder, in the same model package, or among the blobs of Hugging
Face's cache, to which all names of a snapshot link.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool

from olive_ext.config.base import StrictModel, not_bool
from olive_ext.errors import (
    ConfigError,
    DamagedError,
    ModelError,
    NotFoundError,
    first_line,
    keys_once,
    listed,
    special_kind,
)
from olive_ext.model.types import ModelFiles

LONGEST_NAME = 255
"""The most bytes of a file's name on any file system here."""

LARGEST = 16 * 2**20
"""The most bytes of a configuration. Chat templates, its longest part, have some ten thousand."""

_LARGEST_INDEX = 2**28
"""The most bytes of an index of weights: some hundred for each tensor, of which models of experts have 200,000."""

_INDICES = {"*.index.json": "weight_map", "tokenizer_config.json": "fast_tokenizer_files"}
"""Files of a Hugging Face model that name other files, and the key that does."""

_NAMES_FILE = re.compile(r"(file|filename|folder|dir|directory|path)$")

_SUB_FOLDERS = ("additional_chat_templates",)
"""Folders of a model in which transformers also looks for files."""


def inside(folder: Path, name: str, key: str) -> Path:
    """The file or folder that a configuration in `folder` names under `key`, also with Windows' separators. Raises
    `ModelError` for an absolute path, for one with "..", and for a symbolic link that leads out of the folder."""
    written = PurePosixPath(name.replace("\\", "/"))
    if written.is_absolute() or Path(name).is_absolute() or ".." in written.parts or "\0" in name:
        raise ModelError(f"'{folder}' names '{name}' for {key}, which is not inside of the folder", code="untrusted")
    if max(map(len, map(os.fsencode, written.parts)), default=0) > LONGEST_NAME:
        raise DamagedError(f"'{folder}' names '{name[:40]}...' for {key}: a name has at most {LONGEST_NAME} bytes")
    path = folder / (name if _mode(folder / name) else written)
    if _leads_out(path, folder):
        raise ModelError(f"'{folder}' names '{name}' for {key}, a link that leads out of the folder", code="untrusted")
    return path


def within(path: Path, *folders: Path) -> Path:
    """`path`, a file or folder that was found in a model's folder by its name. Raises `ModelError` where it leads out
    of all `folders`, by default the folder that it lies in, and where it is a pipe, a socket or a device."""
    if _leads_out(path, *(folders or (path.parent,))):
        raise ModelError(f"'{path}' leads out of the model's folder, to '{path.resolve()}': put the file itself there")
    if kind := special_kind(path):
        raise ModelError(f"'{path}' is {kind}: a model consists of files and folders", code="no_access")
    return path


def refuse_strangers(folder: Path) -> None:
    """Raises `ModelError` as `within` does for any file of a folder that is handed to transformers or
    onnxruntime-genai, which open every name that they know, and for what an index of a model or tokenizer names outside
    of the folder. Links to folders, hidden files and graphs are allowed, because they open none of these by name alone.
    Does nothing where `folder` is none, as for a name on the hub.
    """
    if not folder.is_dir():
        return
    try:
        for inner in (folder, *(within(folder / name, folder) for name in _SUB_FOLDERS if (folder / name).is_dir())):
            for path in sorted(inner.iterdir()):
                if not (path.name.startswith(".") or ".onnx" in path.name or stat.S_ISDIR(_mode(path))):
                    within(path, folder)
    except OSError as error:
        raise ModelError(f"cannot read the folder '{folder}': {error.strerror or error}", code="no_access") from error
    for file, key in ((file, key) for pattern, key in _INDICES.items() for file in folder.glob(pattern)):
        try:
            named = json_object(file, largest=_LARGEST_INDEX).get(key)
        except ModelError:
            continue  # whoever needs it says why it cannot be read
        names = named.values() if isinstance(named, Mapping) else named if isinstance(named, list) else ()
        for name in {name for name in names if isinstance(name, str)}:
            inside(folder, name, f"{file.name}'s {key}")


def json_object(path: Path, *, largest: int = LARGEST, is_strict: bool = False) -> dict[str, Any]:
    """The object in a JSON file; with `is_strict` one that has no key twice. Raises `ModelError` where the file leads
    out of its folder, has more bytes than `largest`, holds something else, or is not JSON."""
    within(path)
    try:
        size = path.stat().st_size
        if size > largest:
            raise ModelError(f"'{path}' has {size:,} bytes: at most {largest:,} are read", code="too_large")
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, object_pairs_hook=keys_once if is_strict else None)
        if "\\ud" in text.lower():  # half of a character, which names no file
            json.dumps(value, ensure_ascii=False).encode()
    except ModelError:
        raise
    except RecursionError as error:
        raise DamagedError(f"'{path}' is not readable JSON: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise DamagedError(f"'{path}' is not readable JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise DamagedError(f"'{path}' holds {json.dumps(value):.40}, not a JSON object")
    return value


def named_files(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The files that genai_config.json names, each with its dotted key, without those in `session_options`."""
    for key, item in (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    ):
        if isinstance(item, str) and isinstance(key, str) and _NAMES_FILE.search(key):
            yield f"{prefix}{key}", item
        elif key != "session_options":
            yield from named_files(item, f"{prefix}{key}.")


def has_components(manifest: Path) -> bool:
    """Whether a file is the manifest of a model package, of ONNX Runtime's layout or of Olive's."""
    with suppress(ModelError):
        components = json_object(manifest).get("components")
        return isinstance(components, dict) or (isinstance(components, list) and (manifest.parent / "models").is_dir())
    return False


def _mode(path: Path) -> int:
    """The mode of the file after all links; 0 for a file that cannot be reached, and so cannot be opened."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _leads_out(path: Path, *folders: Path) -> bool:
    if not _mode(path):
        return False
    real = path.resolve()
    return not any(real.is_relative_to(root) for folder in folders for root in _own_roots(folder.resolve()))


def _own_roots(folder: Path) -> Iterator[Path]:
    """The roots below which the files of a folder may lie: the folder itself, a model package that contains it, and for
    a snapshot of Hugging Face's cache, or a folder in one, the blobs of the same model."""
    yield folder
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots":
            yield above.parent.parent / "blobs"
        elif not (manifest := above / MANIFEST).is_symlink() and has_components(manifest):
            yield above


LONGEST = 2**31 - 1
"""Positions of a context, which kernels count in 32 bits."""

LARGEST_VOCABULARY = 2**24
"""Tokens; the largest published vocabulary has a million."""

LARGEST_SIZE = 2**20
"""Heads, sizes of a head or a layer, and layers."""


def _number(value: Any) -> Any:
    """Refuses texts, too: what is read later is the file's own value, not one that pydantic has converted."""
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


class ConfigSection(StrictModel):
    """A part of a file; keys that are not declared are not read."""

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
    executor_info: dict[str, str | dict[str, Any] | None] | None = None


class ComponentFile(ConfigSection):
    """component.json of a model package."""

    variants: dict[str, _Variant] | None = None


class Manifest(ConfigSection):
    """manifest.json of a model package."""

    schema_version: str | int | None = None
    components: dict[str, str | ComponentFile] | list[str] | None = None
    shared_assets: Names | None = None


def read_json(path: Path, form: type[ConfigSection] | None = None) -> Mapping[str, Any]:
    """The object in a JSON file. A key whose value is null counts as missing, except for a package's names. Raises
    `ModelError` as `json_object` does, and where a value is not of the type that `form` declares: with the key, the
    value and what is accepted."""
    is_of_package = form in (Manifest, ComponentFile)
    value = json_object(path, is_strict=is_of_package or form is GenaiConfig)
    if form is not None:
        with mistakes_in(path):
            form.parse(value if is_of_package else _without_null(value))
    return _without_null(value)


@contextmanager
def mistakes_in(file: Path) -> Iterator[None]:
    """Turns a mistake in the file's content into a `ModelError` that names it."""
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
    max_new_tokens: Id | None = None
    max_time: Annotated[float, BeforeValidator(_number)] | None = None
    decoder_start_token_id: Ids | None = None
    suppress_tokens: list[Id] | None = None
    begin_suppress_tokens: list[Id] | None = None
    lang_to_id: dict[str, Id] | None = None
    task_to_id: dict[str, Id] | None = None
    forced_decoder_ids: list[Annotated[list[Id | None], Field(min_length=2, max_length=2)]] | None = None
    no_timestamps_token_id: Id | None = None


@dataclass(frozen=True)
class Suppressed:
    """Tokens that are never generated, or not as the first, as transformers does with Whisper's."""

    everywhere: tuple[int, ...] = ()
    at_first: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.everywhere or self.at_first)

    @property
    def bans(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that a row of logits must not generate, by `engine.step.Ban`; empty where no row has any."""
        return ((), self.everywhere, self.everywhere + self.at_first) if self else ()


def read_suppressed(files: ModelFiles) -> Suppressed:
    """`suppress_tokens` and `begin_suppress_tokens` of a model's configurations."""
    keys = ("suppress_tokens", "begin_suppress_tokens")
    return Suppressed(*(tuple(map(int, first_named(key, files))) for key in keys))


def first_named(key: str, files: ModelFiles) -> Sequence[Any]:
    """The ids under `key` in the first file that has it, as one id or a list; empty where no file has it."""
    named = _first(key, files)
    return () if named is None else [named] if isinstance(named, int) else list(named)


def named_ids(key: str, files: ModelFiles) -> Mapping[str, int]:
    """The ids by name under `key` in the first file that has it; empty where none has it."""
    return _first(key, files) or {}


def named_ends(files: ModelFiles) -> dict[str, Sequence[int]]:
    """`eos_token_id` by file, starting with the file that the model's runtime reads: genai_config.json,
    generation_config.json or config.json. A config.json that names no id decides nothing, because transformers writes
    into it only what differs from a class's defaults."""
    sections = _sections(files)
    if "eos_token_id" not in sections.get("config.json", {}):
        sections.pop("config.json", None)
    ids = {file: section.get("eos_token_id", ()) for file, section in sections.items()}
    return {file: [named] if isinstance(named, int) else list(named) for file, named in ids.items()}


def _first(key: str, files: ModelFiles) -> Any:
    return next((section[key] for section in _sections(files).values() if section.get(key) is not None), None)


def generation_files(files: ModelFiles) -> list[Path]:
    """What transformers read of a generation's settings, first to last. Those of the tokenizer's folder stand for those
    of a graph without any configuration, as Olive's OnnxConversion saves one."""
    for folder in (files.directory, *(() if files.genai_config else (Path(files.tokenizer),))):
        named = (folder / "generation_config.json", folder / "config.json")
        if found := [file for file in named if file.is_file()]:
            return found
    return []


def _sections(files: ModelFiles) -> dict[str, Mapping[str, Any]]:
    """What a model's configurations say about generation, by file, the one that its runtime reads first."""
    written = {path.name: read_json(path, GenerationConfig) for path in generation_files(files)}
    name = GENAI_CONFIG if (files.directory / GENAI_CONFIG).is_file() else OVERLAY
    genai = {name: files.genai_config.get("model", {})} if files.genai_config else {}
    return {**genai, **written}


def is_same(value: Any, other: Any) -> bool:
    """Whether two values of configurations are equal, numbers as far as float32 holds them."""
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(is_same(value[key], other[key]) for key in value)
    are_numbers = isinstance(value, int | float) and isinstance(other, int | float)
    if are_numbers and float in (type(value), type(other)):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


def input_window(files: ModelFiles) -> int:
    """The tokens that a graph of static shape takes (0: any). `slide_inputs` is true where it is not written."""
    window = (files.genai_config.get("model") or {}).get("decoder", {}).get("sliding_window") or {}
    return int(window.get("window_size", 0)) if window.get("slide_inputs", True) else 0


GENAI_CONFIG, MANIFEST, OVERLAY = "genai_config.json", "manifest.json", "genai_config_overlay.json"
OLIVE_RECORD = "model_config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

MEDIA_SECTIONS = {"vision": "vision", "speech": "audio"}
"""Sections of genai_config.json whose graph only pictures or sound need, and the name of that part here."""


def real_path(path: str | Path) -> Path:
    """`path` as an absolute path whose folders are resolved. A symlinked *file* keeps its name: in a Hugging Face cache
    the links have the names and the blobs have none. Raises `ModelError` where nothing exists."""
    expanded = Path(path).expanduser()
    if not str(path) or not expanded.exists():  # an empty one would be the working directory
        reason = "is a broken symbolic link" if expanded.is_symlink() else "does not exist"
        raise NotFoundError(f"model path '{path}' {reason}").about("model", path)
    if kind := special_kind(expanded):
        raise ModelError(f"model path '{path}' is {kind}: give a file or a folder", code="no_access")
    return expanded.resolve() if expanded.is_dir() else expanded.parent.resolve() / expanded.name


def contents(folder: Path) -> str:
    """The content of `folder`, for an error message."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    return f"it holds {listed(names)}" if names else "it is empty"


def is_hub_name(name: str, *, needs_owner: bool = False) -> bool:
    """Whether it may be a model on the Hugging Face hub ("owner/name", or "name") and is not a path here. A path that
    does not exist, into a folder that does, counts as a mistyped path."""
    if not _HUB_NAME.fullmatch(name) or name.endswith(".onnx") or Path(name).exists():
        return False
    owner, slash, _ = name.partition("/")
    return not Path(owner).is_dir() if slash else not needs_owner


def olive_record(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Type (in lower case) and config of the model that Olive saved in `folder`; ("", {}) where it saved none."""
    path = folder / OLIVE_RECORD
    record = read_json(path) if path.is_file() else {}
    kind, config = record.get("type"), record.get("config")
    return (kind.lower(), config) if isinstance(kind, str) and isinstance(config, dict) else ("", {})


def missing_encoder(files: ModelFiles) -> str:
    """Which encoder of genai_config.json does not exist, with nothing in its place; empty where none is missing."""
    for section, part in MEDIA_SECTIONS.items():
        name = (files.genai_config.get("model", {}).get(section) or {}).get("filename")
        if name and part not in files.companions:
            file = files.directory / name
            return f"genai_config.json names '{name}' for model.{section}.filename; '{file}' does not exist"
    return ""


def is_same_path(one: str, other: str) -> bool:
    """Whether two paths, or names of models that are not here, mean one file or folder, also through links."""
    first, second = Path(one), Path(other)
    return first == second or (first.exists() and second.exists() and first.samefile(second))
