"""A mended graph with its weights, which are copied, cast and quantized tensor by tensor.

Knows one graph; not which weights are changed, or why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.external_data_helper import uses_external_data

from olive_ext.errors import RunError
from olive_ext.graph.onnx_file import tensors_of
from olive_ext.model.files.constants import Array, Constants

CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class NewTensor:
    """An initializer to be written: what it is called, and its numbers in parts."""

    name: str
    dims: tuple[int, ...]
    data_type: int
    chunks: Callable[[], Iterator[Array]]

    @property
    def num_bytes(self) -> int:
        """The bytes of its numbers. No type of a new tensor is smaller than a byte."""
        size = helper.tensor_dtype_to_np_dtype(self.data_type).itemsize
        return int(np.prod(self.dims, dtype=np.int64)) * size

    def parts(self) -> Iterator[bytes]:
        """Its numbers as they are stored."""
        return (np.ascontiguousarray(chunk).tobytes() for chunk in self.chunks())


def as_new(constants: Constants, name: str, new_name: str, data_type: int) -> NewTensor:
    """An initializer under another name and, where they differ, in another type."""
    tensor = constants.initializers[name]
    dtype = helper.tensor_dtype_to_np_dtype(data_type)

    def chunks() -> Iterator[Array]:
        size = len(flat := constants.numbers(name).reshape(-1))
        step = CHUNK_BYTES // flat.itemsize
        for first in range(0, size, step):  # mapped anew, so that pages which were read can go
            yield constants.numbers(name).reshape(-1)[first : first + step].astype(dtype)

    return NewTensor(new_name, tuple(tensor.dims), data_type, chunks)


PAGE, LARGE = 4096, 1 << 20
"""Numbers of this many bytes begin at a multiple of a page, so that a runtime can map them."""

ALIGNMENT = 64
"""All others begin at a multiple of this."""

SMALL = 1024
"""Bytes up to which numbers stay in the graph's file."""

INLINE_BYTES = 16
"""The most bytes that a tensor inside of the graph's file takes there beside its numbers."""

_Writer: TypeAlias = Callable[[BinaryIO], None]


@dataclass(frozen=True)
class GraphFile:
    """A mended graph and its numbers in their order: what is written."""

    model: onnx.ModelProto
    constants: Constants
    """The constants of the quantized graph, whose kept numbers are copied."""

    new: Mapping[str, NewTensor]
    path: Path
    """The graph's file in the quantized package."""

    data: Path | None
    """The file for its weights, relative to the graph's folder; None where they are inside of the graph's."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the graph and its weights, with the gaps between these; a few more than inside of the graph."""
        graph, parts = self._layout
        inside = sum(new.num_bytes + INLINE_BYTES for new in self.new.values() if self._is_inside(new))
        return graph.ByteSize() + inside + max((offset + length for offset, length, _ in parts), default=0)

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
            del tensor.external_data[:]
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", self.data.as_posix()), ("offset", end), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            parts.append((end, length, write))
            end += length
        return graph, parts

    def _parts(self, graph: onnx.ModelProto) -> Iterator[tuple[TensorProto, int, _Writer]]:
        """Tensor, bytes and writer of all numbers outside of `graph`, in the order of the file; `graph` is a copy, in
        which new tensors are declared."""
        for own, kept in list(zip(tensors_of(self.model), tensors_of(graph), strict=True)):
            if uses_external_data(own):
                length = self.constants.place(own)[2]
                yield kept, length, lambda file, own=own: self._copy(own, file)  # type: ignore[misc]
        for new in self.new.values():
            tensor: TensorProto = graph.graph.initializer.add()
            tensor.name, tensor.data_type = new.name, new.data_type
            tensor.dims.extend(new.dims)
            if not self._is_inside(new):
                yield tensor, new.num_bytes, lambda file, new=new: file.writelines(new.parts())  # type: ignore[misc]

    def _copy(self, tensor: TensorProto, file: BinaryIO) -> None:
        path, offset, left = self.constants.place(tensor)
        with path.open("rb") as source:
            source.seek(offset)
            while left > 0:
                chunk = source.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise RunError(f"'{path}' ends before the numbers of '{tensor.name}' do")
                left -= file.write(chunk)

    def write(self, path: Path) -> None:
        """Writes the graph's file, and that of its weights beside it."""
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
                tensor.raw_data = b"".join(new.parts())
        path.write_bytes(graph.SerializeToString())
