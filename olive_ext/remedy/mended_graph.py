"""A quantized graph with other precisions for some of its weights: nodes and initializers, without numbers in memory.

Knows graphs, not why a weight is changed, and no file but those that weights lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from olive_ext.errors import ModelError
from olive_ext.graph.nodes import all_names, attribute, delete_at, reads, remove_dead
from olive_ext.remedy.graph_file import Array, NewTensor
from olive_ext.remedy.mended_experts import experts_nodes
from olive_ext.remedy.pairing import Target
from olive_ext.remedy.precision import PackedWeight, Precision
from olive_ext.remedy.sources import BIAS, DATA, TABLES, Sources, bias_of
from olive_ext.remedy.weights import GraphWeights, WeightUse

MICROSOFT = "com.microsoft"


@dataclass
class Mending:
    """The edit of one graph: what was decided for it so far."""

    model: onnx.ModelProto
    sources: Sources
    tensors: dict[str, NewTensor] = field(default_factory=dict)
    """New initializers by name, in the order in which nodes read them."""

    _names: set[str] = field(default_factory=set)
    _packed: dict[Target, list[str]] = field(default_factory=dict)
    _floats: dict[tuple[str, int], str] = field(default_factory=dict)
    """New names of the float graph's constants, by their own names and types: tied weights are stored once."""

    def apply(self, choices: Mapping[Target, Precision]) -> None:
        """Replaces the nodes of the targets, and drops what only they used. Raises `ModelError` where a node cannot be
        given the precision."""
        graph = self.model.graph
        owners = {tuple(use.node.output): (target, n) for target in choices for n, use in enumerate(target.quantized)}
        places = [tuple(node.output) for node in graph.node]  # the first one of a node may be left out
        replaced = [n for n, outputs in enumerate(places) if outputs in owners]
        uses = [use for target in choices for use in target.quantized]
        delete_at(graph.node, replaced)
        for name in {name for use in uses for name in _stored(use)} - set(reads(graph.node)):
            remove_dead(graph, name)
        gone = {name for use in uses for name in use.roots} - {tensor.name for tensor in graph.initializer}
        delete_at(graph.input, [n for n, value in enumerate(graph.input) if value.name in gone])
        self._names = set(all_names(graph))
        kept = {tuple(node.output): node for node in graph.node}
        order: list[onnx.NodeProto] = []
        for outputs in places:
            if outputs in owners:
                target, number = owners[outputs]
                order += self._nodes(target, number, choices[target])
            elif outputs in kept:
                order.append(deepcopy(kept[outputs]))
        del graph.node[:]
        graph.node.extend(order)
        if not any(opset.domain == MICROSOFT for opset in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))

    def _nodes(self, target: Target, number: int, precision: Precision) -> list[onnx.NodeProto]:
        """What takes the place of the node `number` of a target's."""
        if not self.sources.offers(target, precision):
            raise ModelError(f"'{target.name}' cannot be {precision.name} in this graph")
        use = target.quantized[number]
        if target.is_of_experts:
            return experts_nodes(target, precision, self.sources, self._constant, self._add)
        if not precision.bits:
            return self._float_nodes(target.floats[number], use)
        if target not in self._packed:
            self._packed[target] = self._packed_names(target, precision)
        weight = self.sources.weight(target.floats[0])
        assert weight is not None  # `offers`
        num_inputs, num_outputs = weight().shape
        if use.node.op_type in TABLES:
            return self._table(use, self._packed[target], precision, num_inputs)
        return [_product(use, self._packed[target], precision, num_inputs, num_outputs)]

    def _float_nodes(self, own: WeightUse, use: WeightUse) -> list[onnx.NodeProto]:
        """The float graph's node, in the quantized graph's types and with its inputs."""
        value, nodes = self._constant(own.value, self.sources.element_type(use))
        node, data = deepcopy(own.node), DATA[own.node.op_type]
        inputs = ["", ""]
        inputs[data], inputs[1 - data] = use.node.input[DATA[use.node.op_type]], value
        bias, output = bias_of(use.node), use.node.output[0]
        added = []
        if bias and own.node.op_type == "Gemm":
            inputs.append(bias)
        elif bias:
            product = self._fresh(f"{output}_without_bias")
            added = [helper.make_node("Add", [product, bias], [output], self._fresh(f"{own.name}/Add"))]
            output = product
        del node.input[:], node.output[:]
        node.input.extend(inputs)
        node.output.append(output)
        return [*nodes, node, *added]

    def _constant(self, value: str, data_type: int) -> tuple[str, list[onnx.NodeProto]]:
        """The name of a constant of the float graph in this one, and the nodes that make it where they are not here
        already."""
        if (value, data_type) in self._floats:
            return self._floats[value, data_type], []
        floats, nodes = self.sources.floats, []
        for maker in floats.makers(value):
            node = deepcopy(maker)
            node.input[:] = [self._initializer(name, data_type) for name in maker.input]
            if node.op_type == "Cast":
                node.attribute[0].i = data_type
            for n, name in enumerate(maker.output):
                node.output[n] = self._floats[name, data_type] = self._fresh(name)
            node.name = self._fresh(maker.name)
            nodes.append(node)
        return self._initializer(value, data_type), nodes

    def _initializer(self, name: str, data_type: int) -> str:
        """The name in this graph of a constant of the float graph that is an initializer, or was made before."""
        if not name or (name, data_type) in self._floats:
            return self._floats.get((name, data_type), "")
        tensor = self.sources.floats.initializers[name]
        is_float = tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
        wanted = data_type if is_float else tensor.data_type
        if self._has(name, wanted):
            self._floats[name, data_type] = name
        else:
            new = self.sources.floats.as_new(name, self._fresh(name), wanted)
            self.tensors[new.name] = new
            self._floats[name, data_type] = new.name
        return self._floats[name, data_type]

    def _has(self, name: str, data_type: int) -> bool:
        """Whether the quantized graph keeps the same numbers under this name: a table that the head's weight is tied
        to, and that was not quantized."""
        own, other = self.sources.quantized.initializers.get(name), self.sources.floats.initializers[name]
        if name not in self._names or own is None or own.data_type != data_type or list(own.dims) != list(other.dims):
            return False
        return own.data_type == other.data_type and np.array_equal(
            self.sources.quantized.numbers(name), self.sources.floats.numbers(name)
        )

    def _packed_names(self, target: Target, precision: Precision) -> list[str]:
        """Names of the integers, the scales, and where there are any the zero points, for all uses of the target."""
        own, use = target.floats[0], target.quantized[0]
        weight = self.sources.weight(own)
        assert weight is not None  # `offers`
        data_type = self.sources.element_type(use)
        is_symmetric = precision.bits == 8 or self.sources.is_symmetric(use)
        dtype = helper.tensor_dtype_to_np_dtype(data_type)
        packed = PackedWeight(weight, dtype, precision, is_symmetric=is_symmetric)
        stem = own.value if own.value in self.sources.floats.initializers else own.name
        names = [
            self._add(f"{stem}_Q{precision.bits}", packed.packed_shape, TensorProto.UINT8, packed.packed),
            self._add(f"{stem}_scales", packed.scales_shape, data_type, packed.scales),
        ]
        if not is_symmetric:
            names.append(self._add(f"{stem}_zero_points", packed.zeros_shape, TensorProto.UINT8, packed.zeros))
        return names

    def _table(self, use: WeightUse, names: list[str], precision: Precision, width: int) -> list[onnx.NodeProto]:
        """The lookup in a table [V, H] whose integers are stored as a product's: a Reshape, and the lookup."""
        shape = numpy_helper.from_array(np.array([-1, width * precision.bits // 8], np.int64))
        made, sizes = self._fresh(f"{names[0]}_table"), self._fresh(f"{names[0]}_shape")
        constant = helper.make_node("Constant", [], [sizes], self._fresh(f"{use.name}/shape"), value=shape)
        reshape = helper.make_node("Reshape", [names[0], sizes], [made], self._fresh(f"{use.name}/Reshape"))
        lookup = helper.make_node(
            "GatherBlockQuantized",
            [made, use.node.input[1], *names[1:]],
            [use.node.output[0]],
            f"{use.name}_Q{precision.bits}",
            domain=MICROSOFT,
            bits=precision.bits,
            block_size=precision.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        return [constant, reshape, lookup]

    def _add(self, name: str, dims: tuple[int, ...], data_type: int, chunks: Callable[[], Iterator[Array]]) -> str:
        tensor = NewTensor(self._fresh(name), dims, data_type, chunks)
        self.tensors[tensor.name] = tensor
        return tensor.name

    def _fresh(self, name: str) -> str:
        """`name`, or with a number behind it where the graph has it already."""
        new, number = name, 1
        while new in self._names:
            number += 1
            new = f"{name}_{number}"
        self._names.add(new)
        return new


def alternative(target: Target, precision: Precision, sources: Sources) -> tuple[Target, GraphWeights]:
    """The weight in another precision as a target of its own, and the small graph that has its numbers."""
    mending = _alone(target, precision, sources)
    for new in mending.tensors.values():
        parts = [part.reshape(-1) for part in new.chunks()]
        mending.model.graph.initializer.append(
            numpy_helper.from_array(np.concatenate(parts).reshape(new.dims), new.name)
        )
    weights = GraphWeights(mending.model, Path())
    uses = tuple(weights.uses[use.name] for use in target.quantized)
    name, size = f"{target.name} as {precision.name}", new_bytes(target, precision, sources)
    return replace(target, name=name, quantized=uses, bytes=size), weights


def new_bytes(target: Target, precision: Precision, sources: Sources) -> int:
    """What the weight takes in another precision."""
    return sum(new.num_bytes for new in _alone(target, precision, sources).tensors.values())


def _alone(target: Target, precision: Precision, sources: Sources) -> Mending:
    """A graph of nothing but the nodes of a weight in another precision."""
    model = onnx.ModelProto(ir_version=10)
    model.opset_import.append(helper.make_opsetid("", 21))
    model.graph.node.extend({tuple(use.node.output): use.node for use in target.quantized}.values())
    mending = Mending(model, sources)
    mending.apply({target: precision})
    return mending


def _product(
    use: WeightUse, names: list[str], precision: Precision, num_inputs: int, num_outputs: int
) -> onnx.NodeProto:
    """A MatMulNBits, with the old node's bias and accuracy level."""
    bias = bias_of(use.node)
    level = attribute(use.node, "accuracy_level", 0)
    data = use.node.input[DATA[use.node.op_type]]
    inputs = [data, *names]
    if bias:
        inputs += [""] * (BIAS["MatMulNBits"] - len(inputs)) + [bias]
    return helper.make_node(
        "MatMulNBits",
        inputs,
        [use.node.output[0]],
        f"{use.name}_Q{precision.bits}",
        domain=MICROSOFT,
        K=num_inputs,
        N=num_outputs,
        bits=precision.bits,
        block_size=precision.block_size,
        **({"accuracy_level": level} if level else {}),
    )


def _stored(use: WeightUse) -> list[str]:
    """The inputs of a node that make its weight up."""
    return [use.node.input[n] for n in use.inputs if n < len(use.node.input) and use.node.input[n]]
