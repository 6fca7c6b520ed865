"""Where a variant of the float graph may begin: at the border below what it changes, with the states that another
variant had there. Knows bound values and runs of steps, no documents.

All below a border computes the same in two variants that differ above it only, so the states of one are the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx
from typing_extensions import override

from olive_ext.engine.runners.ort.bound_weights import BoundWeights, KeptStates, OpenAbove, StepStates
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.graph.upper_part import UpperPart, UpperParts
from olive_ext.model import ResolvedModel
from olive_ext.model.providers.devices import memory_of
from olive_ext.model.types import Role

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
