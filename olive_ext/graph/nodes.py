"""Nodes of a graph: added under names that collide with nothing in it, searched, and removed where nothing reads them;
a model's tensors, and the files in which external weights lie.

Knows ONNX's operator versions, but not what is being built.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
from onnx import ModelProto as ModelProto
from onnx import helper, numpy_helper
from typing_extensions import override

from olive_ext.errors import ModelError

OLDEST_OPSET = 11
"""Negative indices in Gather, which everything here relies on, came with opset 11."""

_AXES_AS_INPUT = {"ReduceSum": 13, "ReduceMax": 18, "ReduceMean": 18}
"""Reductions used here, and the opset since which their axes are an input instead of an attribute."""

LAYER = re.compile(r"(?:^|[/._])(?:layers?|h|blocks?)[./_](\d+)(?:[/._]|$)")
"""A decoder layer's number in the name of a node, as exporters write it."""

QUANTIZING = frozenset(
    (
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "GatherBlockQuantized",
        "MatMulBnb4",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QLinearMatMul",
        "QMoE",
    )
)
"""Operators of quantized weights and activations."""

_HALVES: dict[int, str] = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}

_FEW_BITS = re.compile(r"(U?INT|FLOAT)[248](E.*)?$")
"""Types of numbers of 8 bits or fewer; a matrix of such is a quantized weight, whatever makes floats of it."""


class NodeWriter:
    """Appends nodes to `graph` in place; every method returns the name of the value that its nodes compute."""

    def __init__(self, graph: onnx.GraphProto, opset: int, prefix: str) -> None:
        if opset < OLDEST_OPSET:
            raise ModelError(f"the graph's opset is {opset}; {OLDEST_OPSET} or later is needed")
        self._graph = graph
        self._opset = opset
        self._prefix = prefix
        self._names = set(all_names(graph))

    def add(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """A new node of the default domain with one output, named `output` where given."""
        name = self._fresh(op)
        self._graph.node.append(helper.make_node(op, inputs, [output or name], name=name, **attributes))
        return output or name

    def add_named(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """A new node whose outputs have these names, which are new."""
        self._graph.node.append(helper.make_node(op, inputs, outputs, name=self._fresh(op), **attributes))

    def reduce(self, op: str, value: str, *, keepdims: int = 0) -> str:
        """A reduction over the last axis, in the form of the graph's opset."""
        if self._opset >= _AXES_AS_INPUT[op]:
            return self.add(op, [value, self.integers([-1])], keepdims=keepdims)
        return self.add(op, [value], axes=[-1], keepdims=keepdims)

    def sum_columns(self, values_RV: str, size: int | None) -> str:
        """The sum over the last axis of `values_RV` [R, V], as [R, 1].

        It is taken in two stages of about sqrt(V) elements where V = `size` is known and has such a divisor: that keeps
        the error of sums of exponentials near 1e-6, whatever a device does.
        """
        block = 1 if size is None else next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
        if size is not None and block > 1:
            blocks = self.add("Reshape", [values_RV, self.integers([-1, size // block, block])])
            values_RV = self.reduce("ReduceSum", blocks)
        return self.reduce("ReduceSum", values_RV, keepdims=1)

    def shape(self, lead: Sequence[int], value: str, size: int | None) -> str:
        """The shape [*lead, size of the last axis of `value`], computed at run time where `size` is not known."""
        if size is not None:
            return self.integers([*lead, size])
        last = self.add("Gather", [self.add("Shape", [value]), self.integers([-1])], axis=0)
        return self.add("Concat", [self.integers(lead), last], axis=0)

    def clone(self, node: onnx.NodeProto, renames: Mapping[str, str]) -> dict[str, str]:
        """Adds a copy of `node` over renamed inputs; returns the new name of each of its outputs."""
        copy = self._graph.node.add()
        copy.CopyFrom(node)
        made = {output: self._fresh(node.op_type) for output in node.output if output}
        copy.name = self._fresh(node.op_type)
        copy.input[:] = [renames.get(value, value) for value in node.input]
        copy.output[:] = [made.get(output, "") for output in node.output]
        return made

    def integers(self, values: int | Sequence[int]) -> str:
        """An int64 constant: a scalar, or one axis."""
        return self._constant("integers", np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A float32 constant, a scalar."""
        return self._constant("number", np.array(value, np.float32))

    def table(self, rows: Sequence[Sequence[float]]) -> str:
        """A float32 constant of two axes."""
        return self._constant("table", np.array(rows, np.float32))

    def input(self, name: str, elem_type: int, shape: Sequence[int | str | None]) -> str:
        """A new graph input. Its name is part of the contract, so a collision is an error, not a new name."""
        return self._declare(self._graph.input, name, elem_type, shape)

    def output(self, name: str, elem_type: int, shape: Sequence[int | str | None]) -> str:
        """Declares a new graph output, for a node to be added that writes it."""
        return self._declare(self._graph.output, name, elem_type, shape)

    def _fresh(self, hint: str) -> str:
        number = 0
        while (name := f"{self._prefix}/{hint}_{number}") in self._names:
            number += 1
        self._names.add(name)
        return name

    def _constant(self, hint: str, array: npt.NDArray[Any]) -> str:
        name = self._fresh(hint)
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _declare(self, values: Any, name: str, elem_type: int, shape: Sequence[int | str | None]) -> str:
        if name in self._names:
            raise ModelError(f"the graph already has a value named '{name}', which the scoring head needs")
        self._names.add(name)
        values.append(helper.make_tensor_value_info(name, elem_type, shape))
        return name


class NewGraph(NodeWriter):
    """A graph of its own, written from nothing, of opset 18. What is computed twice is one node."""

    def __init__(self, name: str) -> None:
        super().__init__(onnx.GraphProto(name=name), 18, name)
        self._made: dict[str, str] = {}

    @override
    def add(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        key = output or repr((op, inputs, attributes))
        if key not in self._made:
            self._made[key] = super().add(op, inputs, output, **attributes)
        return self._made[key]

    @override
    def integers(self, values: int | Sequence[int]) -> str:
        if (key := repr(values)) not in self._made:
            self._made[key] = super().integers(values)
        return self._made[key]

    def serialized(self, *domains: str) -> bytes:
        """The graph as a model that uses operators of other `domains`, too."""
        return bytes(model_of(self._graph, self._opset, *domains).SerializeToString())


def model_of(graph: onnx.GraphProto, opset: int, *domains: str) -> onnx.ModelProto:
    """A model of its own around `graph`: version `opset` of ONNX's own operators, version 1 of the other `domains`."""
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def default_opset(model: onnx.ModelProto) -> int:
    """The version of ONNX's own operators that the model is written in."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def all_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Names of all nodes and values, those of subgraphs included."""
    for body in (graph, *nested_graphs(graph.node)):
        yield from (value.name for value in (*body.input, *body.output))
        yield from (tensor.name for tensor in body.initializer)
        for node in body.node:
            yield from (node.name, *node.input, *node.output)


def layer_of(name: str) -> int | None:
    """The decoder layer of a node; None outside of the layers."""
    match = LAYER.search(name)
    return int(match.group(1)) if match else None


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute, or `default` where the node has none of that name."""
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def take_attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute, which is removed from the node, or `default` where it has none of that name."""
    value = attribute(node, name, default)
    delete_at(node.attribute, [index for index, entry in enumerate(node.attribute) if entry.name == name])
    return value


def constants_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """The tensors by the values that have their numbers: initializers, and what Constant nodes hold of numbers."""
    tensors = {}
    for node in (node for node in graph.node if node.op_type == "Constant"):
        entry, name = node.attribute[0], node.output[0]
        if entry.name == "value":
            tensors[name] = entry.t
        elif entry.name.startswith(("value_int", "value_float")):
            dtype = np.int64 if entry.name.startswith("value_int") else np.float32
            tensors[name] = numpy_helper.from_array(np.array(helper.get_attribute_value(entry), dtype), name)
    return tensors | {tensor.name: tensor for tensor in graph.initializer}


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of If, Loop and Scan."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nested_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The bodies of `nodes`, and the bodies of nodes inside them."""
    for node in nodes:
        for body in subgraphs(node):
            yield body
            yield from nested_graphs(body.node)


def reads(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """The values that nodes read, and that their subgraphs take from outside."""
    for node in nodes:
        yield from filter(None, node.input)
        for body in subgraphs(node):
            made = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
            made |= {name for inner in body.node for name in inner.output}
            own = (*reads(body.node), *(value.name for value in body.output))
            yield from (name for name in own if name not in made)


def makers_of(
    nodes: Iterable[onnx.NodeProto], values: Iterable[str], given: Container[str] = ()
) -> list[onnx.NodeProto]:
    """The nodes that make `values`, in the order of `nodes`, which is that of execution. What makes a `given` value for
    others is left out."""
    wanted, makers = set(values), []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output):
            wanted.update(name for name in reads([node]) if name not in given)
            makers.append(node)
    return makers[::-1]


def remove_dead(graph: onnx.GraphProto, value: str) -> None:
    """Removes in place the node that makes `value` if nothing reads it, then what only that node read, and so on."""
    uses = Counter([*reads(graph.node), *(output.name for output in graph.output)])
    dead: list[int] = []
    unread = {value}
    for index, node in reversed([*enumerate(graph.node)]):  # what reads a value stands after what makes it
        if unread.isdisjoint(node.output) or any(uses[name] for name in node.output):
            continue
        dead.append(index)
        read = [*reads([node])]
        uses.subtract(read)
        unread.update(node.output, (name for name in read if not uses[name]))
    delete_at(graph.node, dead)
    delete_at(graph.value_info, [index for index, value in enumerate(graph.value_info) if value.name in unread])
    delete_at(graph.initializer, [index for index, tensor in enumerate(graph.initializer) if tensor.name in unread])


def quantizing_operator(model: onnx.ModelProto) -> str:
    """The first operator by which weights or activations are quantized, else the type of a matrix that is stored in 8
    bits or fewer; empty where there is none."""
    operators = (node.op_type for node in model.graph.node if node.op_type in QUANTIZING)
    return next(operators, "") or few_bits(tensor.data_type for tensor in _matrices(model))


def few_bits(types: Iterable[int]) -> str:
    """The first of ONNX's types whose numbers have 8 bits or fewer; empty where none has."""
    return next(filter(_FEW_BITS.match, map(onnx.TensorProto.DataType.Name, types)), "")


def half_type(model: onnx.ModelProto) -> str:
    """torch's name of the half precision of a graph's matrices, else of its inputs and outputs; empty where none is."""
    declared = (value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output))
    types = chain((tensor.data_type for tensor in _matrices(model)), declared)
    return next((_HALVES[kind] for kind in types if kind in _HALVES), "")


def _matrices(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from (tensor for tensor in constants_of(model.graph).values() if len(tensor.dims) > 1)


def delete_at(field: Any, indices: Iterable[int]) -> None:
    """Deletes items of a repeated field one by one: assigning the others would copy them, weights included."""
    for index in sorted(indices, reverse=True):
        del field[index]


def external_locations(model: onnx.ModelProto) -> set[str]:
    """The files that hold the model's external weights, as written in it: relative to the model's own folder."""
    return {entry.value for tensor in tensors_of(model) for entry in tensor.external_data if entry.key == "location"}


def with_outputs(model: onnx.ModelProto, values: Collection[str] | None = None) -> onnx.ModelProto:
    """A copy of `model` that also returns `values` of its nodes, in the order of the nodes; all where it is None."""
    edited = deepcopy(model)
    known = {value.name for value in edited.graph.output}
    names = [name for node in edited.graph.node for name in node.output if name and name not in known]
    wanted = names if values is None else [name for name in names if name in values]
    edited.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    return edited


def weights_of(
    model: onnx.ModelProto, node: onnx.NodeProto, folder: Path
) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """Name and numbers of each weight that `node` reads; those outside of the file lie in `folder`."""
    wanted = set(node.input)
    for tensor in (tensor for tensor in model.graph.initializer if tensor.name in wanted):
        yield tensor.name, onnx.numpy_helper.to_array(tensor, base_dir=str(folder))


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in the model: initializers, and attributes of nodes in graphs, subgraphs and functions."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    bodies = list(nested_graphs(nodes))
    nodes += (node for body in bodies for node in body.node)
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
    for graph in (model.graph, *bodies):
        yield from graph.initializer
        yield from (part for sparse in graph.sparse_initializer for part in (sparse.values, sparse.indices))
