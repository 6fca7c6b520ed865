"""A graph on disk: its constants as they lie in its files, read where needed, and a mended graph with its weights,
which are copied, cast and quantized tensor by tensor.

Knows one graph; not which weights are changed, or why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from olive_ext.errors import RunError
from olive_ext.graph.nodes import attribute
from olive_ext.graph.onnx_file import external_locations, tensors_of
from olive_ext.model.files.content import external_data_plan

Array = npt.NDArray[Any]

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
        """Of its numbers. No type of a new tensor is smaller than a byte."""
        size = helper.tensor_dtype_to_np_dtype(self.data_type).itemsize
        return int(np.prod(self.dims, dtype=np.int64)) * size

    def parts(self) -> Iterator[bytes]:
        """Its numbers as they are stored."""
        return (np.ascontiguousarray(chunk).tobytes() for chunk in self.chunks())


class Constants:
    """The initializers of a graph and the values that are made of nothing else."""

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        """`path`: the file that `model` was read from. Raises `ModelError` for weights that are missing."""
        self.model = model
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.maker = {name: node for node in model.graph.node for name in node.output if name}
        self._folder, self._renames = external_data_plan(path, external_locations(model))

    def makers(self, value: str) -> list[onnx.NodeProto]:
        """The nodes that make a constant, in an order in which they can run; none for an initializer."""
        if value in self.initializers or not value:
            return []
        node = self.maker[value]
        order: list[onnx.NodeProto] = []
        for name in node.input:
            order += [one for one in self.makers(name) if all(one is not other for other in order)]
        return [*order, node]

    def element_type(self, value: str) -> int:
        """ONNX's type of the numbers of a constant, as far as quantizers and exporters make them."""
        if value in self.initializers:
            return int(self.initializers[value].data_type)
        node = self.maker[value]
        if node.op_type == "Cast":
            return int(attribute(node, "to", TensorProto.FLOAT))
        return self.element_type(node.input[1 if node.op_type == "DequantizeLinear" else 0])

    def view(self, value: str) -> Array | None:
        """A constant without its numbers in memory: a view on the file, transposed as its nodes say; None where they do
        something else."""
        if value in self.initializers:
            return self.numbers(value)
        node = self.maker[value]
        whole = self.view(node.input[0]) if node.op_type in ("Transpose", "Identity") else None
        if whole is None or node.op_type == "Identity":
            return whole
        return np.transpose(whole, attribute(node, "perm", None))

    def numbers(self, name: str) -> Array:
        """The numbers of an initializer, mapped from the file where they lie outside of the graph."""
        tensor = self.initializers[name]
        if not uses_external_data(tensor):
            return onnx.numpy_helper.to_array(tensor)
        path, offset, _ = self.place(tensor)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(path, dtype, "r", offset, tuple(tensor.dims))

    def place(self, tensor: onnx.TensorProto) -> tuple[Path, int, int]:
        """File, offset and bytes of an external tensor's numbers."""
        stored = ExternalDataInfo(tensor)
        path = self._folder / self._renames.get(stored.location, stored.location)
        offset = stored.offset or 0
        return path, offset, stored.length if stored.length is not None else path.stat().st_size - offset

    def as_new(self, name: str, new_name: str, data_type: int) -> NewTensor:
        """An initializer under another name and, where they differ, in another type."""
        tensor = self.initializers[name]
        dtype = helper.tensor_dtype_to_np_dtype(data_type)

        def chunks() -> Iterator[Array]:
            size = len(flat := self.numbers(name).reshape(-1))
            step = CHUNK_BYTES // flat.itemsize
            for first in range(0, size, step):  # mapped anew, so that pages which were read can go
                yield self.numbers(name).reshape(-1)[first : first + step].astype(dtype)

        return NewTensor(new_name, tuple(tensor.dims), data_type, chunks)


PAGE, LARGE = 4096, 1 << 20
"""Numbers of this many bytes begin at a multiple of a page, so that a runtime can map them."""

ALIGNMENT = 64
"""All others begin at a multiple of this."""

SMALL = 1024
"""Bytes up to which numbers stay in the graph's file."""

INLINE_BYTES = 16
"""What numbers inside of the graph's file take there beside themselves, at most."""

_Writer: TypeAlias = Callable[[BinaryIO], None]


@dataclass(frozen=True)
class GraphFile:
    """A mended graph and its numbers in their order: what is written."""

    model: onnx.ModelProto
    constants: Constants
    """Of the quantized graph, whose kept numbers are copied."""

    new: Mapping[str, NewTensor]
    path: Path
    """The graph's file in the quantized package."""

    data: Path | None
    """The file for its weights, relative to the graph's folder; None where they are inside of the graph's."""

    @property
    def num_bytes(self) -> int:
        """Of the graph and its weights, with what lies between these; a few more than there are inside of the graph."""
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
