"""What lies in folders on disk: what Olive wrote down, where a tokenizer is, and which graphs work with a decoder.

These are the stages of a pipeline (genai_config.json's `model.decoder.pipeline`), and companions: named there as well,
or known by the names that exporters give to files. Loads no model and knows no ONNX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError, NotFoundError, counted, listed, special_kind
from olive_ext.model.files.package_config import read_json
from olive_ext.model.files.package_files import inside, refuse_shards_outside, refuse_strangers, within
from olive_ext.model.types import ModelFiles

GENAI_CONFIG = "genai_config.json"
OLIVE_RECORD = "model_config.json"
_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_LEVELS_UP = 3
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_TEXT_SECTIONS = {"embedding": "embedding", "encoder": "encoder"}
"""Sections of genai_config.json whose graph text needs, and what that is called here."""

MEDIA_SECTIONS = {"vision": "vision", "speech": "audio"}
"""Sections whose graph only pictures or sound need, and what that is called here."""

_SIBLINGS = {"encoder": "encoder", "embedding": "embedding", "vision_encoder": "vision", "audio_encoder": "audio"}
"""Folders beside the decoder's in which mobius puts a graph of the decoder's file name, and what that does."""

_WITH_PAST, _WITHOUT_PAST, _MERGED, _ENCODER = (
    "decoder_with_past_model",
    "decoder_model",
    "decoder_model_merged",
    "encoder_model",
)
"""optimum's names of an encoder-decoder's graphs; after them may stand a suffix such as "_quantized"."""


def real_path(path: str | Path) -> Path:
    """`path` as an absolute path with its folders resolved. A symlinked *file* keeps its name: in a Hugging Face cache
    the names lie in the links and the blobs have none. Raises `ModelError` where there is nothing."""
    expanded = Path(path).expanduser()
    if not expanded.exists():
        reason = "is a broken symbolic link" if expanded.is_symlink() else "does not exist"
        raise NotFoundError(f"model path '{path}' {reason}")
    if kind := special_kind(expanded):
        raise ModelError(f"model path '{path}' is {kind}: give a file or a folder", code="no_access")
    return expanded.resolve() if expanded.is_dir() else expanded.parent.resolve() / expanded.name


def upwards(folder: Path) -> Iterator[tuple[Path, str]]:
    """The model's `folder` and the three folders above it, each with its place in words."""
    yield folder, "beside the model"
    for level, above in enumerate(folder.parents[:_LEVELS_UP], start=1):
        yield above, f"{counted(level, 'folder')} above the model"


def contents(folder: Path) -> str:
    """What is in `folder`, for an error message."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    return f"it holds {listed(names)}" if names else "it is empty"


def refuse_strangers_in(*locations: Path) -> None:
    """Raises `ModelError` where a file of these folders, or one that they name, is none of the folder's own."""
    for folder in dict.fromkeys(locations):
        if folder.is_dir():
            refuse_strangers(folder)
            refuse_shards_outside(folder)


def graphs_below(root: Path, pattern: str) -> list[Path]:
    """The .onnx files of `root` by a pattern, each of them one of the folder's own."""
    return [within(file, root) for file in sorted(root.glob(pattern)) if file.exists()]


def is_hub_name(name: str, *, needs_owner: bool = False) -> bool:
    """True for what may be a model on the Hugging Face hub ("owner/name", or "name") and is no path here: a mistyped
    path into a folder that exists is a mistyped path."""
    if not _HUB_NAME.fullmatch(name) or name.endswith(".onnx") or Path(name).exists():
        return False
    owner, slash, _ = name.partition("/")
    return not Path(owner).is_dir() if slash else not needs_owner


def why_missing(kind: str, path: Any, onnx_file_name: str | None) -> str:
    """Why a recipe's input model, of Olive's type `kind` in lower case, is not there; empty where it is, or may be.

    Olive takes a path that does not exist for a name on the hub, and looks there.
    """
    if not isinstance(path, str) or path.startswith("azureml:"):
        return ""
    if not Path(path).exists() and (kind == "onnxmodel" or not is_hub_name(path)):
        return f"'input_model.model_path' = '{path}': no such file or folder"
    if onnx_file_name and Path(path).is_dir() and not (Path(path) / onnx_file_name).is_file():
        return f"'input_model.onnx_file_name' = '{onnx_file_name}' is not in '{path}': {contents(Path(path))}"
    return ""


def olive_record(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Type (in lower case) and config of the model that Olive saved in `folder`; ("", {}) where it saved none."""
    path = folder / OLIVE_RECORD
    record = read_json(path) if path.is_file() else {}
    kind, config = record.get("type"), record.get("config")
    return (kind.lower(), config) if isinstance(kind, str) and isinstance(config, dict) else ("", {})


def find_tokenizer(
    model_folder: Path, option: str | None, genai_config: Mapping[str, Any], candidates: Sequence[tuple[str, str]]
) -> tuple[str, str]:
    """Folder or hub name of the tokenizer, and the rule that found it: the option, genai_config's `tokenizer_dir`, the
    model's folder and the three above, then `candidates` (folder, file or hub name; where it comes from) in order.

    Raises `ModelError` that lists the folders searched.
    """
    if option is not None:
        return _from_option(option)
    locations = [(str(folder), origin) for folder, origin in upwards(model_folder)]
    if tokenizer_dir := (genai_config.get("model") or {}).get("tokenizer_dir"):
        own = inside(model_folder, tokenizer_dir, "model.tokenizer_dir")
        locations.insert(0, (str(own), "genai_config.json's model.tokenizer_dir"))
    locations += candidates
    for location, origin in locations:
        if folder := _folder(Path(location)):
            return str(folder), origin
    for name, origin in candidates:
        if is_hub_name(name, needs_owner=True):
            return name, f"{origin} (a hub name)"
    looked = ", ".join(dict.fromkeys(f"'{location}'" for location, _ in locations))
    raise NotFoundError(f"no tokenizer found: none of {', '.join(_MARKS)} is in {looked}; set 'tokenizer'")


def _from_option(option: str) -> tuple[str, str]:
    path = Path(option).expanduser()
    if folder := _folder(path):
        return str(folder), "the setting 'tokenizer'"
    if path.exists():
        raise NotFoundError(f"'tokenizer' = '{option}' has none of {', '.join(_MARKS)}", "tokenizer", option)
    if is_hub_name(option):
        return option, "the setting 'tokenizer' (a hub name)"
    raise NotFoundError(f"'tokenizer' = '{option}' does not exist", "tokenizer", option)


def _folder(path: Path) -> Path | None:
    if path.is_file():
        path = path.parent
    return path.resolve() if any((path / mark).is_file() for mark in _MARKS) else None


def find_companions(decoder: Path, directory: Path, genai_config: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """The graphs beside `decoder` by what they do, each with the rule that found it; `directory` has genai_config.json.

    "embedding": takes ids where the decoder takes embeddings. "encoder": takes the source of an encoder-decoder.
    "first_step": a decoder without a past, which computes the cross-attention KV. "vision" and "audio": encoders whose
    features the embedding graph puts among the embeddings; those that do not exist are missed by pictures and sound
    alone. Raises `ModelError` for another graph that genai_config.json names and that does not exist.
    """
    graphs = _by_name(decoder)
    for section, part in {**MEDIA_SECTIONS, **_TEXT_SECTIONS}.items():
        name = ((genai_config.get("model") or {}).get(section) or {}).get("filename")
        key = f"model.{section}.filename"
        file = inside(directory, name, key) if name else None
        if file is not None and file.is_file():
            graphs[part] = (file, f"genai_config.json's {key}")
        elif file is not None and section in _TEXT_SECTIONS:
            raise NotFoundError(f"genai_config.json names '{name}' for {key}; '{file}' does not exist")
    return graphs


def missing_encoder(files: ModelFiles) -> str:
    """Which encoder that genai_config.json names does not exist, and nothing else stands for; empty for none."""
    for section, part in MEDIA_SECTIONS.items():
        name = (files.genai_config.get("model", {}).get(section) or {}).get("filename")
        if name and part not in files.companions:
            file = files.directory / name
            return f"genai_config.json names '{name}' for model.{section}.filename; '{file}' does not exist"
    return ""


def pick_with_past(graphs: Sequence[Path]) -> tuple[Path, str] | None:
    """The decoder to run of an encoder-decoder exported by optimum, and why; None for other `graphs`.

    Takes the decoder with a past, because it also runs with an empty past, and because its LM head is not hidden in
    a subgraph of an If node, as that of the merged decoder is.
    """
    by_name = {graph.stem: graph for graph in graphs if (graph.parent / f"{_ENCODER}.onnx").is_file()}
    if _WITH_PAST in by_name and _WITHOUT_PAST in by_name:
        return by_name[_WITH_PAST], "the decoder with a past; the one without computes the cross-attention KV"
    if _MERGED in by_name:
        return by_name[_MERGED], "the decoder with both branches"
    return None


def _by_name(decoder: Path) -> dict[str, tuple[Path, str]]:
    for stem in (_WITH_PAST, _MERGED, _WITHOUT_PAST):
        if decoder.stem.startswith(stem):
            wanted = {"encoder": _ENCODER, **({"first_step": _WITHOUT_PAST} if stem == _WITH_PAST else {})}
            files = {part: decoder.with_stem(decoder.stem.replace(stem, name, 1)) for part, name in wanted.items()}
            rule = f"optimum's name, beside '{decoder.name}'"
            return {part: (within(file), rule) for part, file in files.items() if file.is_file()}
    if decoder.parent.name != "decoder":
        return {}
    siblings = {part: (folder, decoder.parent.parent / folder / decoder.name) for folder, part in _SIBLINGS.items()}
    return {
        part: (within(file, decoder.parent.parent), f"the folder '{folder}' beside the decoder's")
        for part, (folder, file) in siblings.items()
        if file.is_file()
    }


def pipeline_stages(folder: Path, genai_config: Mapping[str, Any]) -> dict[str, Path]:
    """Stage -> file in `folder`, in the order in which they run; empty where the decoder is no pipeline.

    The stages are written as one object or as one each; several may share a file. A stage without a filename gets the
    folder itself; nothing is looked up.
    """
    decoder = (genai_config.get("model") or {}).get("decoder")
    written = decoder.get("pipeline") if isinstance(decoder, Mapping) else None
    stages = [(name, stage) for part in written or () for name, stage in part.items()]
    return {name: inside(folder, stage.get("filename") or "", f"the stage '{name}'") for name, stage in stages}


def find_pipeline(folder: Path, genai_config: Mapping[str, Any], graph: Path) -> dict[str, Path]:
    """The stages of the pipeline where `graph` is one of them; else none, since another graph in the same folder is a
    model of its own.

    Raises `ModelError` that names a stage whose file is missing.
    """
    stages = pipeline_stages(folder, genai_config)
    if not any(file.is_file() and file.samefile(graph) for file in stages.values()):
        return {}
    if problem := missing_stage(folder, stages):
        raise ModelError(problem)
    return stages


def missing_stage(folder: Path, stages: Mapping[str, Path]) -> str:
    """What is wrong with the first stage that has no file; empty where all have one."""
    for name, file in stages.items():
        if not file.is_file():
            written = "no file" if file == folder else f"the file '{file.name}', which is not there: {contents(folder)}"
            return f"'{folder / GENAI_CONFIG}' names for the pipeline's stage '{name}' {written}"
    return ""


def is_same_path(one: str, other: str) -> bool:
    """Whether two paths, or names of models that are not here, mean one file or folder, through links, too."""
    first, second = Path(one), Path(other)
    return first == second or (first.exists() and second.exists() and first.samefile(second))
