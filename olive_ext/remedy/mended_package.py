"""A package with a mended graph, on disk: the quantized package's files under their names, weights copied tensor by
tensor, all of it or nothing.

Knows files and graphs; not which weights are changed, or why.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from olive_ext.errors import ConfigError, RunError
from olive_ext.graph.onnx_file import external_locations, tensors_of
from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import load_graph, weight_files
from olive_ext.model.files.folders import OLIVE_RECORD, real_path
from olive_ext.remedy.constants import CHUNK_BYTES, Constants, NewTensor
from olive_ext.remedy.mended_graph import Mending
from olive_ext.remedy.pairing import Target
from olive_ext.remedy.precision import Precision
from olive_ext.remedy.sources import Sources
from olive_ext.report.numbers import size
from olive_ext.report.report_files import check_writable

PAGE, LARGE = 4096, 1 << 20
"""Numbers of this many bytes begin at a multiple of a page, so that a runtime can map them."""

ALIGNMENT = 64
"""All others begin at a multiple of this."""

SMALL = 1024
"""Bytes up to which numbers stay in the graph's file."""

LARGEST_GRAPH = 1 << 30
"""Bytes up to which a package without external weights gets none: protobuf ends at twice as many."""

INLINE_BYTES = 16
"""What numbers inside of the graph's file take there beside themselves, at most."""

_Writer: TypeAlias = Callable[[BinaryIO], None]


@dataclass(frozen=True)
class Package:
    """A mended graph, its numbers in their order, and the other files of the quantized package: what is written."""

    model: onnx.ModelProto
    constants: Constants
    """Of the quantized graph, whose kept numbers are copied."""

    new: Mapping[str, NewTensor]
    root: Path
    """The quantized package's folder."""

    decoder: Path
    """The graph's file, in `root`."""

    data: Path | None
    """The file for its weights, relative to the decoder's folder; None where they are inside of the graph's."""

    others: tuple[Path, ...]

    unchanged: tuple[Path, ...] = ()
    """The files of the graph and its weights where nothing in them is changed: they are copied, too."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return self.graph_bytes + sum(path.stat().st_size for path in self.others)

    @property
    def graph_bytes(self) -> int:
        """Of the graph and its weights, with what lies between these; a few more than there are inside of the graph."""
        if self.unchanged:
            return sum(path.stat().st_size for path in self.unchanged)
        graph, parts = self._layout
        inside = sum(new.num_bytes + INLINE_BYTES for new in self.new.values() if self._is_inside(new))
        return graph.ByteSize() + inside + max((offset + length for offset, length, _ in parts), default=0)

    def write(self, output: Path) -> None:
        """Writes everything into a new folder. Raises `ConfigError` for one that has files, `RunError` where the disk
        has no room or fails; nothing is left behind then."""
        refuse_filled(output)
        output = output.absolute()
        free = shutil.disk_usage(_nearest(output)).free
        if free < self.num_bytes:
            raise RunError(f"the mended model takes {size(self.num_bytes)}: '{output}' has {size(free)} left")
        work = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
        try:
            work.mkdir(parents=True)
            for path in (*self.others, *self.unchanged):
                target = work / path.relative_to(self.root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            if not self.unchanged:
                self._write_graph(work / self.decoder.relative_to(self.root))
            moved(work, output)
        except OSError as error:
            raise RunError(f"cannot write the mended model to '{output}': {error.strerror or error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _is_inside(self, new: NewTensor) -> bool:
        """Whether its numbers are written into the graph's file."""
        return self.data is None or new.num_bytes <= SMALL

    @cached_property
    def _layout(self) -> tuple[onnx.ModelProto, list[tuple[int, int, _Writer]]]:
        """The graph as it is written, but for numbers inside of it, and offset, bytes and writer of those outside."""
        graph = onnx.ModelProto()
        graph.CopyFrom(self.model)
        parts: list[tuple[int, int, _Writer]] = []
        end = 0
        for tensor, length, write in self._parts(graph):
            assert self.data is not None
            end += -end % (PAGE if length >= LARGE else ALIGNMENT)
            _point(tensor, self.data.as_posix(), end, length)
            parts.append((end, length, write))
            end += length
        return graph, parts

    def _parts(self, graph: onnx.ModelProto) -> Iterator[tuple[TensorProto, int, _Writer]]:
        """Tensor, bytes and writer of all numbers outside of `graph`, in the order of the file; `graph` is a copy, in
        which new tensors are declared."""
        for own, tensor in list(zip(tensors_of(self.model), tensors_of(graph), strict=True)):
            if uses_external_data(own):
                length = self.constants.place(own)[2]
                yield tensor, length, lambda file, own=own: self._copy(own, file)  # type: ignore[misc]
        for new in self.new.values():
            tensor = _declared(graph, new)
            if not self._is_inside(new):
                yield tensor, new.num_bytes, lambda file, new=new: _write_chunks(new, file)  # type: ignore[misc]

    def _copy(self, tensor: TensorProto, file: BinaryIO) -> None:
        path, offset, left = self.constants.place(tensor)
        with path.open("rb") as source:
            source.seek(offset)
            while left > 0:
                chunk = source.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise RunError(f"'{path}' ends before the numbers of '{tensor.name}' do")
                left -= file.write(chunk)

    def _write_graph(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        graph, parts = self._layout
        if self.data is not None:
            data = path.parent / self.data
            data.parent.mkdir(parents=True, exist_ok=True)
            with data.open("xb") as file:
                for offset, _, write in parts:
                    file.write(bytes(offset - file.tell()))
                    write(file)
                file.flush()
                os.fsync(file.fileno())
        for tensor in graph.graph.initializer:
            new = self.new.get(tensor.name)
            if new is not None and self._is_inside(new):
                tensor.raw_data = b"".join(np.ascontiguousarray(part).tobytes() for part in new.chunks())
        path.write_bytes(graph.SerializeToString())


def mended(model: ResolvedModel, sources: Sources, choices: Mapping[Target, Precision]) -> Package:
    """The package of `model` with the targets in other precisions. Raises `ModelError` where one cannot be had."""
    decoder, root = model.files.decoder, root_of(model)
    graph = load_graph(decoder)
    files = weight_files(decoder, external_locations(graph))
    own = {path.resolve() for path in files.values()}
    package = _package_files(model)
    graphs = (path for path in package if path.suffix == ".onnx" and not path.samefile(decoder))
    shared = own & {path for other in graphs for path in _weights(other)}
    mending = Mending(graph, sources)
    mending.apply(choices)
    written = sum(new.num_bytes for new in mending.tensors.values())
    data = None
    if own or graph.ByteSize() + written > LARGEST_GRAPH:
        free = (location for location, path in files.items() if path.resolve() not in shared)
        data = Path(next(free, f"{decoder.stem}.mended.data" if own else f"{decoder.name}.data"))
    replaced = {decoder.resolve(), *(own - shared)}
    others = tuple(path for path in package if path.resolve() not in replaced)
    is_whole = all(path.is_relative_to(root) for path in files.values())
    unchanged = tuple(path for path in package if path.resolve() in replaced) if is_whole and not choices else ()
    return Package(graph, sources.quantized, mending.tensors, root, decoder, data, others, unchanged)


def refuse_filled(output: Path) -> None:
    """Raises `ConfigError` for a folder that has files, or cannot be made."""
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"'output_dir' = '{output}': has files already; give a folder that is new or empty")
    check_writable(output)


def root_of(model: ResolvedModel) -> Path:
    """The folder that is copied: the one that was named, or the named file's, of which only its own files are."""
    return _named(model) if _named(model).is_dir() else model.files.decoder.parent


def copy_of(model: ResolvedModel, folder: Path) -> ResolvedModel:
    """The model in a copy of its package, found there by the settings that found the original."""
    place = folder if _named(model).is_dir() else folder / model.files.decoder.relative_to(root_of(model))
    return model.patched({"model": str(place), "tokenizer": model.files.tokenizer})


def refuse_inside(model: ResolvedModel, output: Path) -> None:
    """Raises `ConfigError` for a place in the folder that is copied."""
    if _named(model).is_dir() and output.resolve().is_relative_to(_named(model).resolve()):
        raise ConfigError(f"'output_dir' = '{output}': lies in the model's folder, which is copied as a whole")


def moved(work: Path, output: Path) -> None:
    """Puts a folder that is complete in its place, where at most an empty one is: not every system replaces that.
    Raises `RunError`."""
    try:
        if output.is_dir():
            output.rmdir()
        work.replace(output)
    except OSError as error:
        raise RunError(f"cannot put the mended model at '{output}': {error.strerror or error}") from error


def _named(model: ResolvedModel) -> Path:
    return real_path(str(model.settings.model))


def _package_files(model: ResolvedModel) -> list[Path]:
    """What a package is copied with: all files of a folder that was named; of a named file those beside it that are no
    other model's, and the graphs that it works with."""
    root, files = root_of(model), model.files
    if _named(model).is_dir():
        return [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != OLIVE_RECORD]
    companions = (path for part in files.companions.values() for path in (part.graph, *part.weights))
    own = {path for path in (files.decoder, *files.weights, *companions) if path.is_relative_to(root)}
    graphs = {path for path in root.glob("*.onnx") if path not in own}
    strangers = {path.resolve() for graph in graphs for path in (graph, *_weights(graph))}
    strangers -= {path.resolve() for path in own}
    beside = {path for path in root.iterdir() if path.is_file() and path.name != OLIVE_RECORD}
    return sorted(own | {path for path in beside if path.resolve() not in strangers})


def _weights(graph: Path) -> set[Path]:
    """The files of a graph's weights."""
    return {path.resolve() for path in weight_files(graph, external_locations(load_graph(graph))).values()}


def _nearest(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _write_chunks(new: NewTensor, file: BinaryIO) -> None:
    for part in new.chunks():
        file.write(np.ascontiguousarray(part).tobytes())


def _declared(graph: onnx.ModelProto, new: NewTensor) -> TensorProto:
    tensor: TensorProto = graph.graph.initializer.add()
    tensor.name, tensor.data_type = new.name, new.data_type
    tensor.dims.extend(new.dims)
    return tensor


def _point(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Has a tensor's numbers lie at a place in a file."""
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
