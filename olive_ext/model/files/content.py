"""What a model is made of on disk: its weights, one digest and one size. Reads no graph: it is given the locations.

ONNX Runtime takes a graph from memory together with one folder, and refuses every location that leaves this folder,
also through a symbolic link. In a Hugging Face cache every file is such a link (snapshots/<rev>/model.onnx.data ->
blobs/<hash>). So links are resolved here, the folder becomes the deepest one that holds all the real files, and the
locations are rewritten relative to it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import ml_dtypes
import numpy as np

from olive_ext.errors import DamagedError, MismatchError, ModelError, NotFoundError, first_line, reading
from olive_ext.model.files.package_config import json_object, named_files, within
from olive_ext.model.spec.tensor_names import Outline
from olive_ext.model.types import ModelFiles

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

_CHUNK_BYTES = 1 << 24
_LFS = b"version https://git-lfs.github.com/spec/"
_HF_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files that a Hugging Face model's weights are in."""

_CONFIGS = (
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "adapter_config.json",
    "genai_config*.json",
)
_TEXTS = ("tokenizer*", "*.model", "*.spm", "vocab*", "merges.txt", "*_tokens*.json", "tekken.json")
_TEMPLATES = ("chat_template*", "additional_chat_templates/*")
_HF_FILES = ("*.bin", "*.index.json", *_HF_WEIGHTS)
"""The files of a model's folder that are opened, also by native code."""

BESIDE_WEIGHTS = (*_CONFIGS, *_TEXTS, *_TEMPLATES)
"""Those that say how a model is asked and run."""


def read_files(files: ModelFiles) -> dict[str, Path]:
    """Every file that opening the model reads, by a label that is the same wherever the files lie.

    These are the graphs with their weights and compiled contexts, and of the folders of model, decoder and tokenizer
    the configurations, the tokenizer, templates and what genai_config.json names. Not all of a folder counts: it may be
    any, with reports and scripts in it. Where a configuration names classes of its own (`auto_map`), all does but other
    graphs and what is hidden: its code may read any of it. Code of another repository counts as the hub's cache has it.
    """
    is_graph, tokenizer = files.decoder != files.directory, Path(files.tokenizer)
    read = dict(_graphs(files)) if is_graph else {}
    for label, graph in list(read.items()):
        read |= {f"{label} {file.name}": file for file in graph.parent.glob(f"{glob.escape(graph.stem)}*.bin")}
    named = {key: files.directory / name for key, name in named_files(files.genai_config)}
    read |= {key: file for key, file in named.items() if file not in read.values()}
    graph_folder = {files.decoder.parent: "decoder"} if is_graph else {}
    roles = {tokenizer: "tokenizer", **graph_folder, files.directory: "model"}  # the last role of a folder is its own
    for folder, role in roles.items():
        patterns = (*BESIDE_WEIGHTS, *(() if is_graph or role != "model" else _HF_FILES))
        wanted = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
        configs = [file.read_bytes() for file in wanted if file.name.endswith("config.json")]
        if any(b'"auto_map"' in text for text in configs):
            read |= {f"code {file.parts[-4:]}": file for text in configs for file in _code_elsewhere(text)}
            wanted.update(file for file in folder.rglob("*") if file not in read.values() and _is_data(folder, file))
        read |= {f"{role} {file.relative_to(folder).as_posix()}": file for file in wanted}
    return {label: file for label, file in read.items() if file.is_file()}


def _code_elsewhere(config: bytes) -> Iterator[Path]:
    """Python that `auto_map` names as "owner/name--file.Class", with what lies beside it."""
    from huggingface_hub import try_to_load_from_cache

    for name, file in {*re.findall(r'"([\w.-]+/[\w.-]+)--(\w+)\.', config.decode(errors="replace"))}:
        if isinstance(known := try_to_load_from_cache(name, f"{file}.py"), str):
            yield from Path(known).parent.glob("*.py")


def _is_data(folder: Path, file: Path) -> bool:
    parts = file.relative_to(folder).parts
    return ".onnx" not in file.name and not any(part.startswith(".") or part == "__pycache__" for part in parts)


def model_digest(files: ModelFiles, *more: Path) -> str:
    """Digest (32 hex digits) of the content of every file that opening the model reads (`read_files`), and of `more`.
    It is the same wherever the files lie. Every file is read whole, once in a process unless it changes (1 s/GB)."""
    parts: list[tuple[str, Path | bytes]] = [*sorted(read_files(files).items()), *((file.name, file) for file in more)]
    return digest_of(parts if Path(files.tokenizer).is_dir() else [*parts, ("tokenizer", files.tokenizer.encode())])


def _graphs(files: ModelFiles) -> Iterator[tuple[str, Path]]:
    yield "decoder", files.decoder
    yield from ((f"weights {index}", path) for index, path in enumerate(files.weights))
    for part, companion in files.companions.items():
        yield from ((f"{part} {index}", path) for index, path in enumerate((companion.graph, *companion.weights)))


def size_on_disk(files: ModelFiles) -> int:
    """Bytes of the graphs that run and their external data."""
    return sum(path.stat().st_size for path in {path.resolve() for _, path in _graphs(files)})


def hf_weights(folder: Path) -> list[Path]:
    """The weight files of the Hugging Face model in `folder`; none where it is only known by name."""
    return sorted(file for pattern in _HF_WEIGHTS for file in folder.glob(pattern))


def weight_files(decoder: Path, locations: Iterable[str]) -> dict[str, Path]:
    """Location -> file, as named, for each external-data location in `decoder`, sorted.

    A location is looked up beside the decoder, then beside the file that a symbolic link `decoder` points to. Raises
    `ModelError` that names the missing file, a location outside the model's folder, or a link that leads out of it.
    """
    files = {}
    for location in sorted(set(locations)):
        relative = PurePosixPath(os.path.normpath(location).replace("\\", "/"))
        if relative.is_absolute() or relative.parts[:1] == ("..",):
            raise ModelError(f"'{decoder}' keeps weights in '{location}', outside its own folder", code="untrusted")
        candidates = (decoder.parent / relative, decoder.resolve().parent / relative)
        file = next((path for path in candidates if path.is_file()), None)
        if file is None:
            raise NotFoundError(f"'{decoder}' keeps weights in '{location}', and '{candidates[0]}' does not exist")
        files[location] = within(file, *(path.parent for path in (decoder, decoder.resolve())))
    return files


def refuse_pointer(file: Path) -> None:
    """Raises `ModelError` for a pointer of Git LFS, which a clone without LFS leaves in place of a large file."""
    with file.open("rb") as content:
        if content.read(len(_LFS)) != _LFS:
            return
        text = _LFS + content.read(400)
    size = next((line[5:].decode() for line in text.splitlines() if line.startswith(b"size ")), "?")
    raise DamagedError(f"'{file}' is a pointer of Git LFS in place of a file of {size} bytes: run `git lfs pull`")


def relocated(decoder: Path, model: onnx.ModelProto) -> tuple[Path, onnx.ModelProto]:
    """The folder with which to open `model`, which was read from `decoder`, from memory, and a copy whose weights are
    named relative to that folder. Where no name changes it is the model itself, because a copy of inline weights would
    take their size in memory. Raises `ModelError` as `weight_files` does, and for files on different drives."""
    from olive_ext.graph.nodes import external_locations, tensors_of

    files = {location: file.resolve() for location, file in weight_files(decoder, external_locations(model)).items()}
    try:
        folder = Path(os.path.commonpath([file.parent for file in files.values()] or [decoder.resolve().parent]))
    except ValueError as error:
        raise MismatchError(f"the weights of '{decoder}' lie on different drives") from error
    names = {location: file.relative_to(folder).as_posix() for location, file in files.items()}
    if all(old == new for old, new in names.items()):
        return folder, model
    moved = deepcopy(model)
    for entry in (entry for tensor in tensors_of(moved) for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = names[entry.value]
    return folder, moved


def digest_of(parts: Iterable[tuple[str, Path | bytes]]) -> str:
    """32 hex digits of labels and contents, a file's or the bytes themselves. A file that this process has read before,
    and whose size, times and number are the same, is not read again. The time of its status (ctime) cannot be set, as
    the time of its content can (`touch -r`)."""
    digest = hashlib.sha256()
    for label, part in parts:
        if isinstance(part, Path):
            facts = part.stat()
            unchanged = facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino
            part = _content(os.path.realpath(part), unchanged)
        digest.update(f"{label} {len(part)}\n".encode() + part)
    return digest.hexdigest()[:32]


@lru_cache(maxsize=1 << 12)
def _content(path: str, facts: tuple[int, ...]) -> bytes:
    digest = hashlib.sha256()  # twice as fast as blake2b where the processor has instructions for it
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with Path(path).open("rb", buffering=0) as content:
        while count := content.readinto(buffer):
            digest.update(buffer[:count])
    return digest.digest()


def load_graph(path: Path) -> onnx.ModelProto:
    """The model of an .onnx file, whose external data stay on disk. Raises `ModelError` where the file is missing or
    holds no graph."""
    import onnx

    try:
        refuse_pointer(path)
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror or error}", code="no_access") from error
    except ModelError:
        raise
    except Exception as error:  # protobuf's DecodeError, which only protobuf itself could name here
        raise DamagedError(f"'{path}' is a broken graph: {first_line(error)} ({path.stat().st_size} bytes)") from error
    if not model.graph.node or not model.graph.output or not model.opset_import:
        reason = "it has no nodes, no outputs or no opset"
        raise DamagedError(f"'{path}' is a broken graph: {reason} ({path.stat().st_size} bytes)")
    return model


def read_outline(path: Path) -> Outline:
    """What `load_graph` would find, as an outline; raises `ModelError` as that does."""
    import onnx

    from olive_ext.graph.nodes import tensors_of  # imported here: they bring onnx along
    from olive_ext.model.spec.attention import graph_inputs, tensor_spec

    model = load_graph(path)
    locations: dict[str, int] = {}
    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location, end = _external_range(path, tensor)
            locations[location] = max(end, locations.get(location, 0))
    with reading(path):
        outputs = {value.name: tensor_spec(value) for value in model.graph.output}
        return Outline(graph_inputs(model.graph), outputs, locations)


def _external_range(path: Path, tensor: onnx.TensorProto) -> tuple[str, int]:
    """The file of a tensor's numbers, and where in it they end, in bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        location, offset, length = entries["location"], *(int(entries.get(key) or 0) for key in ("offset", "length"))
        if min(offset, length) < 0 or not isinstance(location, str):  # bytes where it is no UTF-8
            raise ValueError(location)
    except (KeyError, ValueError) as error:
        raise DamagedError(f"'{path}' is a broken graph: the external data of '{tensor.name}' are {entries}") from error
    return location, offset + length


def checkpoint_floats(folder: Path) -> dict[str, NDArray[Any]]:
    """The floating-point tensors of the Hugging Face model in `folder`, mapped from the files that transformers take:
    what config.json names, safetensors before PyTorch's, and of each one whole file before those of an index. Empty
    without such files. The format: https://huggingface.co/docs/safetensors, "Format"."""
    config = folder / "config.json"
    stated = json_object(config).get("transformers_weights") if config.is_file() else None
    names = [stated] if isinstance(stated, str) else ["model.safetensors", "pytorch_model.bin"]
    for file in (folder / name.removesuffix(".index.json") for name in names):
        index = file.with_name(f"{file.name}.index.json")
        if file.is_file() or index.is_file():
            named = [file.name] if file.is_file() else sorted({*json_object(index)["weight_map"].values()})
            parts = [folder / name for name in named if (folder / name).is_file()]
            read = _safetensors if file.suffix == ".safetensors" else _pickled
            tensors = {name.replace("language_model.", ""): one for part in parts for name, one in read(part)}
            return {name: one for name, one in tensors.items() if one.size}
    return {}


def _safetensors(file: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    dtypes: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    dtypes |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(size))
    for name, entry in header.items():
        if entry.get("dtype") in dtypes and 0 not in entry["shape"]:
            place = 8 + size + entry["data_offsets"][0]
            yield name, np.memmap(file, dtypes[entry["dtype"]], "r", place, tuple(entry["shape"]))


def _pickled(file: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    import torch

    for name, tensor in torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True).items():
        if tensor.dtype == torch.bfloat16:
            yield name, tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        elif tensor.is_floating_point():
            yield name, tensor.numpy()
