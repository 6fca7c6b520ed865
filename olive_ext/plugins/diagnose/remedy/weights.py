"""The weights of one graph, in whatever form they are stored, as plain matrices.

A stored form is never decoded here: ONNX Runtime's own kernels do it. A node that takes packed numbers is given the
identity matrix, or every index, and constants are folded, each in a session of its own. Knows one graph at a time.
Axes: K inputs and N outputs of a product, V rows of a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from copy import deepcopy
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
from olive_ext.graph.nodes import attribute
from olive_ext.model.files.constants import FLOATS, WEIGHTS, Constants, part_name, unpacked
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.table import CPU

Matrix = npt.NDArray[Any]

IDENTITY_ROWS = 1024
"""Rows of the identity matrix that a product is given at a time: all of a product of 16,384 inputs are a gigabyte."""

_INPUTS = {**WEIGHTS, "MatMulNBits": {"": (1, 2, 3, 4)}}
"""By operator the parts that are weights, and the inputs of which each is made up; the first one has the numbers."""

_PACKED = ("MatMulNBits", "GatherBlockQuantized", "QMoE")
"""Operators that take packed numbers."""

_BIAS = {"MatMulNBits": 5, "Gemm": 2, "MatMul": 2}
"""By operator of a product the first input that is no part of it."""

_EXPERT_BITS = (4, 8)

HOST = Provider(CPU, "cpu")


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
        self._roots: dict[str, frozenset[str] | None] = {}
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
                free = self._free(use.name)
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
            is_stored = use.value in self.initializers
            return self._numbers(use.value) if is_stored else self._run([], {}, use.value)
        if use.part:
            return self._experts(use)
        node = deepcopy(use.node)
        if node.op_type == "GatherBlockQuantized":  # [V, N], looked up row by row
            indices = np.arange(self.initializers[node.input[2]].dims[0], dtype=np.int64)
            return self._run([node], {node.input[1]: indices}, node.output[0])
        return self._product(node)

    def product(self, use: WeightUse, rows: Matrix) -> Matrix:
        """The product [R, N] of `rows` [R, K] by the node of a weight on the host, without its bias."""
        node = deepcopy(use.node)
        del node.input[_BIAS.get(node.op_type, len(node.input)) :]
        return self._run([node], {node.input[0]: rows}, node.output[0])

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

    def num_bytes(self, use: WeightUse) -> int:
        """Bytes that the weight takes in the model's files: numbers, scales and zero points."""
        tensors = [self.initializers[name] for name in use.roots]
        return sum(
            self.place(one)[2] if uses_external_data(one) else len(one.raw_data) or self.numbers(one.name).nbytes
            for one in tensors
        )

    def _free(self, name: str) -> str:
        """The name, or with a number after it where nodes differ in their counters alone."""
        if name not in self.uses:
            return name
        return next(free for n in itertools.count(2) if (free := f"{name} {n}") not in self.uses)

    def _use(self, node: onnx.NodeProto, part: str) -> WeightUse | None:
        inputs = _INPUTS[node.op_type][part]
        names = [node.input[i] for i in inputs if i < len(node.input) and node.input[i]]
        if not node.name or inputs[0] >= len(node.input) or not node.input[inputs[0]]:
            return None
        if node.op_type == "QMoE" and attribute(node, "expert_weight_bits", 4) not in _EXPERT_BITS:
            return None
        roots = self._roots_of_all(names)
        if not roots or not any(len(self.initializers[name].dims) >= 2 for name in roots):
            return None
        if node.op_type not in _PACKED and not any(self.initializers[name].data_type in FLOATS for name in roots):
            return None
        return WeightUse(part_name(node, part), node, roots, part)

    def _roots_of_all(self, names: Iterable[str]) -> frozenset[str] | None:
        """The initializers that these values are made of alone; None where one depends on an input of the graph."""
        roots: set[str] = set()
        for name in names:
            if name not in self._roots:
                self._roots[name] = self._roots_of(name)
            part = self._roots[name]
            if part is None:
                return None
            roots |= part
        return frozenset(roots)

    def _roots_of(self, value: str) -> frozenset[str] | None:
        if value in self.initializers:
            return frozenset((value,))
        maker = self.maker.get(value)
        if maker is None or any(part.HasField("g") for part in maker.attribute):
            return None
        return self._roots_of_all([name for name in maker.input if name])

    def _product(self, node: onnx.NodeProto) -> Matrix:
        """[K, N]. Each sum of a row of the identity matrix has one term that is not zero, so it is exact; activations
        are not rounded for it, whatever the node's accuracy level."""
        del node.input[_BIAS[node.op_type] :]
        for part in node.attribute:
            if part.name == "accuracy_level":
                part.i = 0
        num_inputs, dtype = int(attribute(node, "K", 0)), self._numbers(node.input[2]).dtype
        firsts = range(0, num_inputs, IDENTITY_ROWS)
        blocks = [np.eye(min(IDENTITY_ROWS, num_inputs - k), num_inputs, k, dtype=dtype) for k in firsts]
        return np.concatenate([self._run([node], {node.input[0]: block}, node.output[0]) for block in blocks])

    def _experts(self, use: WeightUse) -> Matrix:
        """[E, N, K]: packed along K, two numbers a byte where these have 4 bits, blocks along K, or none."""
        numbers, scales, *zeros = (
            self._numbers(use.node.input[i]) for i in use.inputs if i < len(use.node.input) and use.node.input[i]
        )
        bits = attribute(use.node, "expert_weight_bits", 4)
        scales = scales.reshape(*numbers.shape[:2], -1)
        num_inputs, num_blocks = numbers.shape[2] * 8 // bits, scales.shape[2]
        points = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
        if zeros:
            points = unpacked(zeros[0].reshape(*scales.shape[:2], -1), bits)[..., :num_blocks]
        stored = {"numbers": unpacked(numbers, bits), "scales": scales, "points": points}
        node = helper.make_node("DequantizeLinear", [*stored], ["y"], axis=2, block_size=-(-num_inputs // num_blocks))
        tensors = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
        return computed([node], tensors, {}, "y", [helper.make_opsetid("", 21)], 10)

    def _run(self, nodes: Sequence[onnx.NodeProto], feeds: dict[str, Matrix], output: str) -> Matrix:
        """The value `output` of `nodes`, and of those before them that make constants, with `feeds` as inputs."""
        wanted = [name for node in nodes for name in node.input if name and name not in feeds] if nodes else [output]
        order: list[onnx.NodeProto] = []
        for name in wanted:
            order += [one for one in self.makers(name) if all(one is not other for other in order)]
        used = {name for node in (*order, *nodes) for name in node.input}
        stored = [self.tensor(name) for name in sorted(used & self.initializers.keys())]
        return computed([*order, *nodes], stored, feeds, output, self.model.opset_import, self.model.ir_version)

    def tensor(self, name: str) -> onnx.TensorProto:
        """A copy of an initializer with its numbers inside."""
        tensor = deepcopy(self.initializers[name])
        if uses_external_data(tensor):
            path, offset, length = self.place(tensor)
            with path.open("rb") as file:
                file.seek(offset)
                tensor.raw_data = file.read(length)
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
        return tensor

    def _numbers(self, name: str) -> Matrix:
        return onnx.numpy_helper.to_array(self.tensor(name))


def computed(
    nodes: Sequence[onnx.NodeProto],
    stored: Sequence[onnx.TensorProto],
    feeds: dict[str, Matrix],
    output: str,
    opsets: Iterable[onnx.OperatorSetIdProto],
    ir_version: int,
) -> Matrix:
    """The value `output` of a graph of these nodes, by ONNX Runtime on the host."""
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    graph = helper.make_graph(nodes, "weight", inputs, [onnx.ValueInfoProto(name=output)], stored)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    (value,) = open_session(model.SerializeToString(), [HOST]).run([output], feeds)
    return np.asarray(value)
