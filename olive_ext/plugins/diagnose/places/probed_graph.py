"""A graph whose values between nodes can be read, and given: its order, where it can be cut, and parts that run by
themselves. Knows no session.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy.typing as npt
import onnx

from olive_ext.graph.nodes import nested_graphs, reads
from olive_ext.graph.symbolic_dims import factors
from olive_ext.graph.value_shapes import Shapes

GIVEN = "/given"
"""Behind the name of a given value that the same part computes anew."""

_NO_TENSORS = ("Sequence", "SplitToSequence", "Optional")
"""Operators whose names begin so return no tensors."""

Types = Mapping[str, tuple[int, Sequence[int]]]
"""By values their ONNX types and shapes."""


class Part(NamedTuple):
    """Some nodes of a graph, which run by themselves."""

    nodes: tuple[int, ...]
    """Their numbers in order of execution."""

    taken: Mapping[str, str]
    """The given values that they read, by the inputs that these are."""

    wanted: tuple[str, ...]
    types: Types
    """Of the given values."""


class ProbedGraph:
    """Nodes are numbered as they can be executed, what logits need first; those that no output needs are left out."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, graph = model, model.graph
        self.outputs = [output.name for output in graph.output]
        self.nodes = _ordered(graph)
        self._reads = [frozenset(reads([node])) for node in self.nodes]
        self.makers = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}
        self._last = {name: index for index, names in enumerate(self._reads) for name in names}
        changing = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
        for node, names in zip(self.nodes, self._reads, strict=True):
            if names & changing:
                changing.update(node.output)
        self.values = [
            name
            for node in self.nodes
            if not node.op_type.startswith(_NO_TENSORS)
            for name in node.output
            if name in changing and (name in self._last or name in self.outputs)
        ]
        """All values that depend on the graph's inputs and that something reads, in order."""

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Elements of `values`, by these shapes of the graph's inputs; the most of all known where it is not known."""
        axes = {
            dim.dim_param: size
            for value in self.model.graph.input
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False)
        }
        found = Shapes(self.model.graph).of
        known: dict[str, int] = {}
        for name in self.values:
            parts = factors(found[name] or ()) if found.get(name) is not None else None
            if parts is not None and all(isinstance(part, int) or part in axes for part in parts):
                known[name] = math.prod(part if isinstance(part, int) else axes[part] for part in parts)
        return {name: known.get(name, max(known.values(), default=1)) for name in self.values}

    def live(self, values: Iterable[str], place: int) -> list[str]:
        """Those of `values` that nodes before `place` make and nodes from there on read."""
        return [name for name in values if self.makers[name] < place <= self._last.get(name, -1)]

    def places(self, begin: int, end: int, count: int, sizes: Mapping[str, int]) -> list[int]:
        """Up to `count` places between two that cut the nodes into about equal parts, where least is read across."""
        change = [0] * (len(self.nodes) + 2)
        for name, size in sizes.items():
            change[self.makers[name] + 1] += size
            change[max(self._last.get(name, -1), self.makers[name]) + 1] -= size
        across = list(accumulate(change))
        width = (end - begin) / (count + 1)
        found = []
        for number in range(1, count + 1):
            middle = begin + number * width
            near = range(max(begin + 1, math.ceil(middle - width / 2)), min(end, math.ceil(middle + width / 2)))
            if near:
                found.append(min(near, key=lambda place: (across[place], abs(place - middle))))
        return found

    def part(self, given: Types, wanted: Collection[str]) -> Part:
        """What computes `wanted` from `given` values and the graph's inputs. A given value that is wanted, too, is
        computed anew, and its readers take the given one."""
        needed: set[int] = set()
        pending = [self.makers[name] for name in wanted]
        while pending:
            index = pending.pop()
            if index not in needed:
                needed.add(index)
                read = self._reads[index] & self.makers.keys()
                pending += [self.makers[name] for name in read - given.keys()]
        made = {name for index in needed for name in self.nodes[index].output}
        taken = {name for index in needed for name in self._reads[index]} & given.keys()
        inputs = {name + GIVEN if name in made else name: name for name in given if name in taken}
        return Part(tuple(sorted(needed)), inputs, tuple(wanted), given)

    def model_of(self, part: Part) -> onnx.ModelProto:
        """The part as a model, whose external weights lie where the whole graph's do."""
        whole, renames = self.model.graph, {name: taken for taken, name in part.taken.items()}
        read = {name for index in part.nodes for name in self._reads[index]}
        model = onnx.ModelProto(ir_version=self.model.ir_version)
        model.opset_import.extend(self.model.opset_import)
        model.functions.extend(self.model.functions)
        graph = model.graph
        graph.name = whole.name or "part"
        graph.node.extend(_renamed(self.nodes[index], renames) for index in part.nodes)
        graph.initializer.extend(tensor for tensor in whole.initializer if tensor.name in read)
        graph.sparse_initializer.extend(tensor for tensor in whole.sparse_initializer if tensor.values.name in read)
        kept = {tensor.name for tensor in graph.initializer}
        graph.input.extend(value for value in whole.input if value.name in read and value.name not in kept)
        make = onnx.helper.make_tensor_value_info
        graph.input.extend(make(taken, *part.types[name]) for taken, name in part.taken.items())
        made = {name for node in graph.node for name in node.output}
        declared = {value.name: value for value in whole.output if value.name in made}
        graph.output.extend(declared.pop(name, onnx.ValueInfoProto(name=name)) for name in part.wanted)
        graph.output.extend(declared.values())  # else ONNX Runtime puts caches where shorter ones were
        return model


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    bodies = list(nested_graphs([copy]))
    for one in [copy, *(inner for body in bodies for inner in body.node)]:
        one.input[:] = [names.get(name, name) for name in one.input]
    for output in (output for body in bodies for output in body.output):
        output.name = names.get(output.name, output.name)
    return copy


def _ordered(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes that outputs need, each behind what it reads: from the first output down."""
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    done: dict[int, None] = {}
    pending: list[Any] = [makers[output.name] for output in reversed(graph.output) if output.name in makers]
    while pending:
        index = pending[-1]
        before = {makers[name] for name in reads([graph.node[index]]) if name in makers} - done.keys()
        if index in done or not before:
            done[pending.pop()] = None
        else:
            pending += sorted(before, reverse=True)
    return [graph.node[index] for index in done]


def types_of(values: Mapping[str, npt.NDArray[Any]]) -> Types:
    """The ONNX type and the shape of each array."""
    to_type = onnx.helper.np_dtype_to_tensor_dtype
    return {name: (to_type(array.dtype), array.shape) for name, array in values.items()}
