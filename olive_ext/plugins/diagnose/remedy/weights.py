"""The weights of one graph, in whatever form they are stored, as plain matrices.

Packed numbers are decoded as their kernels do it, and constants are folded by ONNX Runtime, each in a session of its
own. Knows one graph at a time.
Axes: K inputs and N outputs of a product, V rows of a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper
from onnx.external_data_helper import uses_external_data

from olive_ext.errors import ModelError
from olive_ext.graph.nodes import attribute, makers_of
from olive_ext.model.files.constants import FLOATS, WEIGHTS, Constants, part_name
from olive_ext.model.files.grids import packed_grid
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.table import CPU

Matrix = npt.NDArray[Any]

ROWS = 1024
"""Rows of a packed weight that are decoded at a time."""

_INPUTS = {**WEIGHTS, "MatMulNBits": {"": (1, 2, 3, 4)}}
"""By operator the parts that are weights, and the inputs of which each is made up; the first one has the numbers."""

_PACKED = ("MatMulNBits", "GatherBlockQuantized", "QMoE")
"""Operators that take packed numbers."""


@dataclass(frozen=True, eq=False)
class WeightUse:
    """A node that multiplies by a constant matrix, or looks its rows up."""

    name: str
    """The node's name, without what quantizers append."""

    node: onnx.NodeProto
    roots: frozenset[str]
    """The initializers that the matrix is made of."""

    part: str = ""
    """Which of several weights of the node it is: "fc1", "fc2" or "fc3" of experts."""

    constant: int | None = None
    """The number of the node's input where it is an initializer of whatever kind; None for the weight of a product, a
    table or experts."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the node's inputs that the weight is made of, those with the numbers first."""
        return _INPUTS[self.node.op_type][self.part] if self.constant is None else (self.constant,)

    @property
    def value(self) -> str:
        """The name of the node's input that is the weight."""
        return str(self.node.input[self.inputs[0]])

    @property
    def is_packed(self) -> bool:
        """Whether the node itself turns packed numbers into the matrix."""
        return self.constant is None and self.node.op_type in _PACKED

    @property
    def is_transposed(self) -> bool:
        """Whether the node multiplies by the transpose of its matrix: a Gemm may."""
        return self.constant is None and self.node.op_type == "Gemm" and bool(attribute(self.node, "transB", 0))

    def as_in(self, other: WeightUse, matrix: Matrix) -> Matrix:
        """This use's matrix in the layout of `other`, by what their nodes do with it: a square one does not show it."""
        return matrix if self.is_transposed == other.is_transposed else matrix.T


class GraphWeights(Constants):
    """The constant matrices that the nodes of a graph use, by name."""

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        """`path`: the file that `model` was read from. Raises `ModelError` where two nodes have one name."""
        super().__init__(model, path)
        self._roots: dict[str, frozenset[str] | None] = {name: frozenset((name,)) for name in self.initializers}
        self.uses: dict[str, WeightUse] = {}
        named: set[tuple[str, str]] = set()
        for node in model.graph.node:
            for part in _INPUTS.get(node.op_type, ()):
                use = self._use(node, part)
                if use is None:
                    continue
                if (node.name, part) in named:
                    raise ModelError(f"two nodes are called '{use.name}': weights are known by their nodes' names")
                named.add((node.name, part))
                names = (f"{use.name} {n}" if n > 1 else use.name for n in itertools.count(1))
                free = next(name for name in names if name not in self.uses)  # nodes may differ in counters alone
                self.uses[free] = replace(use, name=free)

    def constant(self, name: str) -> WeightUse | None:
        """The first node that reads an initializer; None for one that none does."""
        for node in self.model.graph.node:
            if name in node.input:
                return WeightUse(name, node, frozenset((name,)), constant=list(node.input).index(name))
        return None

    def matrix(self, use: WeightUse) -> Matrix:
        """The matrix that the node computes with: [K, N], or [V, N] of a table; [N, K] for a Gemm that transposes it;
        [E, N, K] of E experts."""
        if not use.is_packed:
            return self._value(use.value)
        names = [*use.node.input, *[""] * 14]
        stored, scales = (self._value(names[i]) for i in use.inputs[:2])
        zeros, *more = (self._value(names[i]) if names[i] else None for i in use.inputs[2:])
        grid = packed_grid(use.node, stored, scales, zeros, *more)
        rows = np.empty(grid.shape, scales.dtype)
        for first in range(0, len(rows), ROWS):
            rows[first : first + ROWS] = grid.rows(first, first + ROWS)[0]
        if use.part:
            return rows.reshape(len(stored), -1, grid.num_inputs)
        return rows if use.node.op_type == "GatherBlockQuantized" else rows.T

    def makers(self, value: str) -> list[onnx.NodeProto]:
        """The nodes that make a constant, in an order in which they can run; none for an initializer."""
        return [] if value in self.initializers else makers_of(self.model.graph.node, [value])

    def element_type(self, value: str) -> int:
        """ONNX's type of the numbers of a constant, as far as quantizers and exporters make them."""
        if value in self.initializers:
            return int(self.initializers[value].data_type)
        node = self.maker[value]
        if node.op_type == "Cast":
            return int(attribute(node, "to", TensorProto.FLOAT))
        return self.element_type(node.input[1 if node.op_type == "DequantizeLinear" else 0])

    def num_bytes(self, use: WeightUse) -> int:
        """Bytes that the weight takes in the model's files: numbers, scales and zero points."""
        tensors = [self.initializers[name] for name in use.roots]
        return sum(
            self.place(tensor)[2]
            if uses_external_data(tensor)
            else len(tensor.raw_data) or self.numbers(tensor.name).nbytes
            for tensor in tensors
        )

    def _use(self, node: onnx.NodeProto, part: str) -> WeightUse | None:
        inputs = _INPUTS[node.op_type][part]
        names = [node.input[i] for i in inputs if i < len(node.input) and node.input[i]]
        if not node.name or inputs[0] >= len(node.input) or not node.input[inputs[0]]:
            return None
        if node.op_type == "QMoE" and attribute(node, "expert_weight_bits", 4) not in (4, 8):
            return None
        roots = self._roots_of(names)
        if not roots or not any(len(self.initializers[name].dims) >= 2 for name in roots):
            return None
        if node.op_type not in _PACKED and not any(self.initializers[name].data_type in FLOATS for name in roots):
            return None
        return WeightUse(part_name(node, part), node, roots, part)

    def _roots_of(self, values: Iterable[str]) -> frozenset[str] | None:
        """The initializers that these values are made of alone; None where one depends on an input of the graph."""
        roots: set[str] = set()
        for value in filter(None, values):
            if value not in self._roots:
                maker = self.maker.get(value)
                is_plain = maker is not None and not any(part.HasField("g") for part in maker.attribute)
                self._roots[value] = self._roots_of(maker.input) if maker is not None and is_plain else None
            if (part := self._roots[value]) is None:
                return None
            roots |= part
        return frozenset(roots)

    def _value(self, name: str) -> Matrix:
        """A constant's numbers, computed by ONNX Runtime on the host where nodes make them."""
        if name in self.initializers:
            return onnx.numpy_helper.to_array(self.tensor(name))
        nodes = self.makers(name)
        used = {one for node in nodes for one in node.input}
        stored = [self.tensor(one) for one in sorted(used & self.initializers.keys())]
        graph = helper.make_graph(nodes, "weight", [], [onnx.ValueInfoProto(name=name)], stored)
        opsets, ir_version = self.model.opset_import, self.model.ir_version
        model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
        (value,) = open_session(model.SerializeToString(), [Provider(CPU, "cpu")]).run([name], {})
        return np.asarray(value)


SLAB_BYTES = 1 << 26
"""Float numbers that are in memory at a time while a weight is quantized."""


@dataclass(frozen=True)
class Precision:
    """How the numbers of a weight are stored: floating point as in the rest of the graph, or integers in blocks."""

    bits: int = 0
    """The bits of the integers; 0 for floating point."""

    block_size: int = 0

    @property
    def name(self) -> str:
        """ "float", or e.g. "int8 in blocks of 32"."""
        return f"int{self.bits} in blocks of {self.block_size}" if self.bits else "float"


FLOAT = Precision()


class PackedWeight:
    """A weight [K, N] as MatMulNBits takes it, by ONNX Runtime's own tool: each column in blocks along K."""

    def __init__(
        self, weight: Callable[[], Matrix], dtype: np.dtype[Any], precision: Precision, *, is_symmetric: bool
    ) -> None:
        """`weight` gives the matrix, as a view on a file where it is large; `dtype` is that of the scales."""
        self._weight, self._dtype, self._precision, self._is_symmetric = weight, dtype, precision, is_symmetric
        self._num_inputs, self._num_outputs = num_inputs, num_outputs = weight().shape
        blocks, bits = -(-num_inputs // precision.block_size), precision.bits
        self.packed_shape = (num_outputs, blocks, precision.block_size * bits // 8)
        self.scales_shape = (num_outputs, blocks)
        self.zeros_shape = (num_outputs, -(-blocks * bits // 8))
        self._scales: list[Matrix] = []
        self._zeros: list[Matrix] = []

    def packed(self) -> Iterator[Matrix]:
        """The integers [N, B, bytes of a block], by rows; scales and zero points are kept for after them."""
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits  # imported here: it takes seconds

        config = nbits.DefaultWeightOnlyQuantConfig(
            block_size=self._precision.block_size, is_symmetric=self._is_symmetric, bits=self._precision.bits
        )
        quantizer = nbits.DefaultWeightOnlyQuantizer(config)
        in_tool = self._dtype if self._dtype in (np.float32, np.float16) else np.dtype(np.float32)
        columns = max(1, SLAB_BYTES // (self._num_inputs * in_tool.itemsize))
        self._scales, self._zeros = [], []
        for first in range(0, self._num_outputs, columns):
            slab = np.ascontiguousarray(self._weight()[:, first : first + columns].astype(self._dtype).astype(in_tool))
            packed, scales, zeros = quantizer.qbits_block_quant(slab)
            self._scales.append(scales.astype(self._dtype))
            self._zeros.append(zeros)
            yield packed

    def scales(self) -> Iterator[Matrix]:
        """[N, B]."""
        self._finish()
        yield from self._scales

    def zeros(self) -> Iterator[Matrix]:
        """Zero points [N, bytes of B of them], uint8."""
        self._finish()
        yield from self._zeros

    def _finish(self) -> None:
        if sum(len(slab) for slab in self._scales) < self._num_outputs:
            for _ in self.packed():
                pass
