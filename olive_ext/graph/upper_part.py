"""What of a graph some of its inputs decide, cut off from the rest of it. Knows no layers and no tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx

from olive_ext.graph.nodes import reads


@dataclass(frozen=True)
class UpperPart:
    """The nodes that some inputs decide, by their numbers, and what these nodes read of the others."""

    nodes: frozenset[int]
    border: tuple[str, ...]
    """Values that other nodes make of tokens or weights, in the order of the graph."""

    beside: frozenset[int]
    """Other nodes whose values are read, and need neither tokens nor weights nor caches: masks, lengths, rotary tables.
    They belong to both parts."""


class UpperParts:
    """The parts of one graph."""

    def __init__(self, graph: onnx.GraphProto, caches: Mapping[str, str], changing: Collection[str]) -> None:
        """`caches`: by the outputs that a later step takes as an input these inputs; `changing`: the other inputs
        that values at a border depend on (tokens, weights)."""
        self._graph, self._caches = graph, caches
        self._reads = [frozenset(reads([node])) for node in graph.node]
        self._readers: dict[str, list[int]] = defaultdict(list)
        for index, names in enumerate(self._reads):
            for name in names:
                self._readers[name].append(index)
        self._makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
        self._changed = self.decided_by({*changing, *caches.values()})

    def decided_by(self, values: Iterable[str]) -> frozenset[int]:
        """The nodes that read these values, or what is made of them, in this step or a later one."""
        found: set[int] = set()
        pending = list(values)
        while pending:
            for index in self._readers.get(pending.pop(), ()):
                if index not in found:
                    found.add(index)
                    made = self._graph.node[index].output
                    pending += [*made, *(self._caches[name] for name in made if name in self._caches)]
        return frozenset(found)

    def part(self, values: Iterable[str]) -> UpperPart | None:
        """What these inputs decide; None where that is no part which runs by itself: it reads a cache that the rest
        writes."""
        nodes = self.decided_by(values)
        read = {name for index in nodes for name in self._reads[index]}
        makers = {self._makers[name] for name in read if name in self._makers} - nodes
        border = [name for index in sorted(makers & self._changed) for name in self._graph.node[index].output]
        border = [name for name in border if name in read]
        own = {past for present, past in self._caches.items() if self._makers.get(present) in nodes}
        others = set(self._caches.values()) - own
        if others & read or set(border) & set(self._caches):
            return None
        return UpperPart(nodes, tuple(border), self._with_makers(makers - self._changed))

    def cut(self, model: onnx.ModelProto, part: UpperPart, border: Iterable[onnx.ValueInfoProto]) -> onnx.ModelProto:
        """A part of `model` by itself, which takes the `border`, and every input of the whole but the rest's caches,
        read or not."""
        upper = onnx.ModelProto(ir_version=model.ir_version)
        upper.opset_import.extend(model.opset_import)
        upper.functions.extend(model.functions)
        graph, whole = upper.graph, self._graph
        graph.name = whole.name
        graph.node.extend(whole.node[index] for index in sorted(part.nodes | part.beside))
        read = {name for index in part.nodes | part.beside for name in self._reads[index]}
        made = {name for node in graph.node for name in node.output}
        graph.initializer.extend(tensor for tensor in whole.initializer if tensor.name in read)
        graph.sparse_initializer.extend(tensor for tensor in whole.sparse_initializer if tensor.values.name in read)
        graph.output.extend(value for value in whole.output if value.name in made and value.name not in part.border)
        dropped = {past for present, past in self._caches.items() if present not in made}
        graph.input.extend(value for value in whole.input if value.name not in dropped)
        graph.input.extend(border)
        return upper

    def _with_makers(self, nodes: Iterable[int]) -> frozenset[int]:
        """The nodes with those that make what they read, and so on."""
        found: set[int] = set()
        pending = list(nodes)
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending += [self._makers[name] for name in self._reads[index] if name in self._makers]
        return frozenset(found)
