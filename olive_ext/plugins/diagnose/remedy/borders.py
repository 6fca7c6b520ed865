"""Where a variant of the float graph may begin: at the border below what it changes, with the states that another
variant had there. Knows bound values and runs of steps, no documents.

What some inputs decide is a part of the graph that runs by itself. All below its border computes the same in two
variants that differ above it only, so the states of one are the other's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx
from typing_extensions import override

from olive_ext.engine.runners.ort.bound_weights import BoundWeights, KeptStates, OpenAbove, StepStates
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.graph.nodes import reads
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.model import ResolvedModel
from olive_ext.model.providers.devices import memory_of
from olive_ext.model.types import Role


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


MOST = 16
"""Borders of a graph: each has a session of its own, and keeps its states."""

MEMORY = 0.25
"""Share of the free memory that states may take."""

_LEAST_GAIN = 0.05
"""A border that saves less of the multiplications is none."""


@dataclass(eq=False)
class Border:
    """The part of a graph above it."""

    part: UpperPart
    decided: frozenset[str]
    """The bound values that change nothing below."""

    share: float
    """Of the whole graph's multiplications by bound weights."""

    opened: OpenedRunner | None = None
    states: StepStates | None = None


class Borders(BoundWeights):
    """Bound weights of a decoder, whose steps leave their states at borders."""

    def __init__(
        self,
        values: Mapping[str, npt.NDArray[Any]],
        prepare: Callable[[ModelProto], None],
        model: ResolvedModel,
        levels: Sequence[Collection[str]],
    ) -> None:
        """`levels`: of each border that may be the bound values that are above it."""
        super().__init__(values, prepare)
        self._model, self._levels = model, levels
        self.kept = KeptStates(int(MEMORY * memory_of("cpu").free))
        self.borders: list[Border] = []
        """From the lowest to the highest."""

        self._proto = ModelProto()
        self._parts: UpperParts
        self._open_above: OpenAbove

    @override
    def edit(self, proto: ModelProto) -> None:
        super().edit(proto)
        self.borders = self._found(proto) if _is_fit(self._model) else []
        left = dict.fromkeys(name for border in self.borders for name in border.part.border)
        present = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in left if name not in present)
        self._proto = proto
        self.states = StepStates(self.kept, left=tuple(left))

    @override
    def opened(self, above: OpenAbove) -> None:
        self._open_above = above

    def above(self, border: Border, run: Hashable) -> OpenedRunner:
        """The runner of the part above a border, opened when it is first asked for; its types are those of `run`."""
        if border.opened is None:
            infos = [
                onnx.helper.make_tensor_value_info(name, *self.kept.type_of(run, name)) for name in border.part.border
            ]
            proto = self._parts.cut(self._proto, border.part, infos)
            border.states = StepStates(self.kept, taken=border.part.border)
            border.opened = self._open_above(proto, border.states)
        assert border.opened is not None
        return border.opened

    def _found(self, proto: ModelProto) -> list[Border]:
        spec, graph = self._model.spec, proto.graph
        tokens = {one.tensor.name for one in spec.inputs if one.role is Role.INPUT_IDS}
        changing = {*tokens, *spec.embeddings, *self._arrays}
        self._parts = UpperParts(graph, {cache.present: cache.past for cache in spec.caches}, changing)
        nodes = {name: self._parts.decided_by([name]) for name in self._arrays}
        sizes = self._multiplied(graph)
        found: dict[tuple[str, ...], Border] = {}
        for values in self._levels:
            part = self._parts.part(values)
            if part is None or not part.border:
                continue
            read = {name for index in part.nodes for name in graph.node[index].input}
            share = sum(size for name, size in sizes.items() if name in read) / max(1, sum(sizes.values()))
            decided = frozenset(name for name, own in nodes.items() if own <= part.nodes)
            if share <= 1 - _LEAST_GAIN:
                found[part.border] = Border(part, decided, share)
        borders = sorted(found.values(), key=lambda border: -border.share)
        every = -(-len(borders) // MOST)
        return borders[::-1][::every][::-1] if borders else []

    def _multiplied(self, graph: onnx.GraphProto) -> dict[str, int]:
        """The sizes of the bound weights that are multiplied with, not looked up."""
        readers = {name for node in graph.node if "Gather" not in node.op_type for name in node.input}
        return {name: array.size for name, array in self._arrays.items() if name in readers and array.size > 1}


def _is_fit(model: ResolvedModel) -> bool:
    """Whether the engine's steps of a model may begin above others'."""
    takes_text = model.media is None and not model.spec.cross
    return takes_text and model.device.kind == "cpu" and model.buckets.steps == "none"
