"""The constants of a graph as they lie in its files: the nodes that make one, and numbers that are read where needed.

Knows one graph, and nothing of what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from olive_ext.graph.nodes import attribute
from olive_ext.graph.onnx_file import external_locations
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
