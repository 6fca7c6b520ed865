"""What a model is made of on disk: its weights, one digest and one size. Reads no graph: it is given the locations.

ONNX Runtime takes a graph from memory together with one folder, and refuses every location that leaves this folder,
also through a symbolic link. In a Hugging Face cache every file is such a link (snapshots/<rev>/model.onnx.data ->
blobs/<hash>). So links are resolved here, the folder becomes the deepest one that holds all the real files, and the
locations are rewritten relative to it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from olive_ext.errors import ModelError, first_line, understood
from olive_ext.model.files.folders import tokenizer_files
from olive_ext.model.files.package_files import within
from olive_ext.model.spec.tensor_names import Outline
from olive_ext.model.types import ModelFiles

if TYPE_CHECKING:
    import onnx

_CHUNK_BYTES = 1 << 24
_LFS = b"version https://git-lfs.github.com/spec/"
_HF_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files that a Hugging Face model's weights are in."""

_HF_FILES = ("config.json", *_HF_WEIGHTS, "*.bin", "tokenizer*", "vocab*", "merges.txt")
"""The files that may decide a Hugging Face model's numbers."""


def content_hash(files: ModelFiles) -> str:
    """Digest (32 hex digits) of everything that decides a model's numbers: graph, external data, genai_config.json's
    `model`, tokenizer and chat template. The same wherever the files lie; reads all of them (about 1 s/GB)."""
    config = json.dumps(files.genai_config.get("model"), sort_keys=True).encode()
    token_files = tokenizer_files(files.tokenizer)
    parts: list[tuple[str, Path | bytes]] = [("genai_config", config), *_graphs(files)]
    parts += ((f"tokenizer {path.name}", path) for path in token_files)
    return digest_of(parts if token_files else [*parts, ("tokenizer", files.tokenizer.encode())])


def model_files(files: ModelFiles) -> list[Path]:
    """The files that `content_hash` reads, wherever they lie; of a Hugging Face model its tokenizer's and weights."""
    return [path for _, path in _graphs(files) if path.is_file()] + tokenizer_files(files.tokenizer)


def _graphs(files: ModelFiles) -> Iterator[tuple[str, Path]]:
    yield "decoder", files.decoder
    yield from ((f"weights {index}", path) for index, path in enumerate(files.weights))
    for part, companion in files.companions.items():
        yield from ((f"{part} {index}", path) for index, path in enumerate((companion.graph, *companion.weights)))


def hf_content_hash(folder: Path) -> str:
    """Digest (32 hex digits) of a Hugging Face model's weights, configuration and tokenizer in `folder`."""
    files = {path for pattern in _HF_FILES for path in folder.glob(pattern)}
    return digest_of([(path.name, path) for path in sorted(files)])


def size_on_disk(files: ModelFiles) -> int:
    """Bytes of the graphs that run and their external data."""
    companions = (path for part in files.companions.values() for path in (part.graph, *part.weights))
    return sum(
        path.stat().st_size for path in {path.resolve() for path in (files.decoder, *files.weights, *companions)}
    )


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
            raise ModelError(f"'{decoder}' keeps weights in '{location}', outside its own folder")
        candidates = (decoder.parent / relative, decoder.resolve().parent / relative)
        file = next((path for path in candidates if path.is_file()), None)
        if file is None:
            raise ModelError(f"'{decoder}' keeps weights in '{location}', and '{candidates[0]}' does not exist")
        files[location] = within(file, *(path.parent for path in (decoder, decoder.resolve())))
    return files


def refuse_short(decoder: Path, file: Path, needed: int) -> None:
    """Raises `ModelError` for external data of fewer bytes than the graph reads, or a pointer of Git LFS."""
    refuse_pointer(file)
    if (size := file.stat().st_size) < needed:
        raise ModelError(f"'{file}' has {size:,} bytes, and '{decoder}' reads {needed:,} of it: it is cut off")


def refuse_pointer(file: Path) -> None:
    """Raises `ModelError` for a pointer of Git LFS, which a clone without LFS leaves in the place of a large file."""
    with file.open("rb") as content:
        if content.read(len(_LFS)) != _LFS:
            return
        text = _LFS + content.read(400)
    size = next((line[5:].decode() for line in text.splitlines() if line.startswith(b"size ")), "?")
    raise ModelError(
        f"'{file}' is a pointer of Git LFS ({file.stat().st_size} bytes) in place of a file of {size} bytes: run `git "
        "lfs pull`"
    )


def external_data_plan(decoder: Path, locations: Iterable[str]) -> tuple[Path, dict[str, str]]:
    """The folder to open `decoder` from memory with, and new location by old one for those that change.

    Raises `ModelError` as `weight_files` does, and where the files lie on different drives.
    """
    files = {location: file.resolve() for location, file in weight_files(decoder, locations).items()}
    if not files:
        return decoder.resolve().parent, {}
    try:
        folder = Path(os.path.commonpath([file.parent for file in files.values()]))
    except ValueError as error:
        raise ModelError(f"the weights of '{decoder}' lie on different drives") from error
    moved = {location: file.relative_to(folder).as_posix() for location, file in files.items()}
    return folder, {old: new for old, new in moved.items() if old != new}


def digest_of(parts: Iterable[tuple[str, Path | bytes]]) -> str:
    """32 hex digits of labels and contents, a file's or the bytes themselves."""
    digest = hashlib.sha256()  # twice as fast as blake2b where the processor has instructions for it
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for label, part in parts:
        size = len(part) if isinstance(part, bytes) else part.stat().st_size
        digest.update(f"{label} {size}\n".encode())
        with io.BytesIO(part) if isinstance(part, bytes) else part.open("rb", buffering=0) as content:
            while count := content.readinto(buffer):
                digest.update(buffer[:count])
    return digest.hexdigest()[:32]


def load_graph(path: Path) -> onnx.ModelProto:
    """The model of an .onnx file, whose external data stay on disk. Raises `ModelError` where the file is missing or
    holds no graph."""
    import onnx

    try:
        refuse_pointer(path)
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except ModelError:
        raise
    except Exception as error:  # protobuf's DecodeError, which only protobuf itself could name here
        raise ModelError(f"'{path}' is a broken graph: {first_line(error)} ({path.stat().st_size} bytes)") from error
    if not model.graph.node or not model.graph.output or not model.opset_import:
        reason = "it has no nodes, no outputs or no opset"
        raise ModelError(f"'{path}' is a broken graph: {reason} ({path.stat().st_size} bytes)")
    return model


def read_outline(path: Path) -> Outline:
    """What `load_graph` finds, in outline; raises `ModelError` as that does."""
    import onnx

    from olive_ext.graph.onnx_file import tensors_of  # imported here: they bring onnx along
    from olive_ext.model.spec.attention import graph_inputs, tensor_spec

    model = load_graph(path)
    locations: dict[str, int] = {}
    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location, end = _external_range(path, tensor)
            locations[location] = max(end, locations.get(location, 0))
    with understood(path):
        outputs = {value.name: tensor_spec(value) for value in model.graph.output}
        return Outline(graph_inputs(model.graph), outputs, locations)


def _external_range(path: Path, tensor: onnx.TensorProto) -> tuple[str, int]:
    """The file of a tensor's numbers, and where they end in it, in bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        location, offset, length = entries["location"], *(int(entries.get(key) or 0) for key in ("offset", "length"))
        if min(offset, length) < 0 or not isinstance(location, str):  # bytes where it is no UTF-8
            raise ValueError(location)
    except (KeyError, ValueError) as error:
        raise ModelError(f"'{path}' is a broken graph: the external data of '{tensor.name}' are {entries}") from error
    return location, offset + length
