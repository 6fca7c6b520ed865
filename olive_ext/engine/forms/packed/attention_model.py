"""One PagedAttention of a graph, its own or one that was rewritten, alone in a model, whose numbers go in and come out
in fp32. Runs nothing.

Axes: N tokens of all rows of a step, D = heads x head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from olive_ext.engine.forms.packed.attention_reference import COS, K_NORM, Q_NORM, SIN, SINK
from olive_ext.engine.forms.packed.rewrite import BOUNDS, PASTS, STARTS, TABLE
from olive_ext.graph.nodes import attribute, model_of

LENGTH = 640
"""Tokens of a text: in three blocks, beyond the 512 from which on a decoding kernel splits the keys."""

WINDOW = 300
"""Longer windows are cut to so many positions: 640 would not show them."""

PAST = ("past_key", "past_value")
PRESENT = ("present_key", "present_value")
OUTPUT = "attended"

SCALES = (14, 15)
"""Places of the node's inputs."""

_GIVEN: Mapping[int, str] = {**dict(enumerate((*PAST, STARTS, PASTS, TABLE), 3)), 16: BOUNDS}
"""By place in the node the inputs of a trial that are no numbers to attend to."""

_CACHE: tuple[str | int | None, ...] = ("blocks", "block_size")
_INTEGERS: Mapping[str, list[str | int | None]] = {TABLE: ["B", "blocks"], STARTS: ["B + 1"], PASTS: ["B"], BOUNDS: [3]}


@dataclass(frozen=True)
class AttentionTrial:
    """`graph` takes `inputs`, `PAST` in blocks, which it returns as `PRESENT`, and what a packed step has; it returns
    `OUTPUT` [N, D]."""

    graph: bytes
    node: onnx.NodeProto
    """The attention, with the window that is tried."""

    inputs: Mapping[int, tuple[tuple[int, ...], int]]
    """By place in `node` the shape, in which 0 stands for the number of tokens, and the type that it is rounded to."""

    elem_type: int
    """The cache's."""

    heads: int
    head_size: int


def input_name(place: int) -> str:
    """The input of a trial's graph in the place of the node's."""
    return f"input_{place}"


def attention_trials(paged: onnx.ModelProto, caches: Mapping[str, tuple[int, int]]) -> list[AttentionTrial]:
    """One for each kind of attention in a graph over a paged cache: its attributes, which inputs it has, and how it
    stores. `caches`: heads and head size of each KV input."""
    types = {value.name: value.type.tensor_type.elem_type for value in paged.graph.input}
    weights = {tensor.name: tensor for tensor in paged.graph.initializer}
    found: dict[object, AttentionTrial] = {}
    for node in paged.graph.node:
        if node.op_type != "PagedAttention" or node.input[3] not in caches:
            continue
        cache = types[node.input[3]], *caches[node.input[3]]
        given = [tuple(weights[name].dims) if name in weights else bool(name) for name in node.input]
        kind = (tuple(sorted(entry.SerializeToString() for entry in node.attribute)), *given, cache)
        if kind not in found:
            found[kind] = _TrialGraphs(node, weights, cache).build()
    return list(found.values())


class _TrialGraphs:
    def __init__(self, node: onnx.NodeProto, weights: Mapping[str, TensorProto], cache: tuple[int, int, int]) -> None:
        self._source = node
        self._weights = weights
        self._elem_type, self._heads, self._stored = cache
        self._inputs: dict[int, tuple[tuple[int, ...], int]] = {}
        self._casts: list[onnx.NodeProto] = []

    def build(self) -> AttentionTrial:
        node = onnx.NodeProto()
        node.CopyFrom(self._source)
        node.output[:] = ["narrow", *PRESENT]
        for entry in node.attribute:
            if entry.name == "local_window_size":
                entry.i = min(entry.i, WINDOW)
        for place, name in enumerate(self._source.input):
            node.input[place] = self._input(place, name) if name else ""
        return AttentionTrial(self._model(node), node, self._inputs, self._elem_type, self._heads, self._stored)

    def _input(self, place: int, name: str) -> str:
        """The name of the node's input number `place`, which the trial's model takes in its place."""
        if place in _GIVEN:
            return _GIVEN[place]
        weight = self._weights.get(name)
        elem_type = TensorProto.FLOAT if place in SCALES else self._narrow
        elem_type = int(weight.data_type) if weight is not None else elem_type
        wide = input_name(place)
        self._inputs[place] = self._shape(place, weight), elem_type
        self._casts.append(helper.make_node("Cast", [wide], [f"{wide}_narrow"], name=wide, to=elem_type))
        return f"{wide}_narrow"

    @property
    def _narrow(self) -> int:
        """The type of queries: the cache's, or fp16 where that is quantized."""
        floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
        return self._elem_type if self._elem_type in floats else TensorProto.FLOAT16

    def _width(self, place: int) -> int:
        heads = int(attribute(self._source, "num_heads", 0))
        is_packed = not self._source.input[1]
        count = self._heads if place else heads + (2 * self._heads if is_packed else 0)
        return count * self._stored

    def _shape(self, place: int, weight: TensorProto | None) -> tuple[int, ...]:
        if place < 3:
            return (0, self._width(place))
        if place in (COS, SIN):  # one that is computed from the length turns whole heads
            return (LENGTH, int(weight.dims[1]) if weight is not None else self._stored // 2)
        if weight is not None:
            return tuple(weight.dims)
        heads = int(attribute(self._source, "num_heads", 0))
        return ({SINK: heads, Q_NORM: self._stored, K_NORM: self._stored}.get(place, 1),)

    def _model(self, node: onnx.NodeProto) -> bytes:
        value, cache = helper.make_tensor_value_info, [*_CACHE, self._heads, self._stored]
        inputs = [
            value(input_name(place), TensorProto.FLOAT, [size or None for size in shape])
            for place, (shape, _) in self._inputs.items()
        ]
        nodes = [
            *self._casts,
            node,
            helper.make_node("Cast", ["narrow"], [OUTPUT], name=OUTPUT, to=TensorProto.FLOAT),
        ]
        read = set(node.input)
        inputs += [value(name, self._elem_type, cache) for name in PAST]
        inputs += [value(name, TensorProto.INT32, shape) for name, shape in _INTEGERS.items() if name in read]
        outputs = [value(OUTPUT, TensorProto.FLOAT, ["N", "D"])]
        outputs += [value(name, self._elem_type, cache) for name in PRESENT]
        graph = helper.make_graph(nodes, "attention", inputs, outputs)
        return bytes(model_of(graph, 21, "com.microsoft").SerializeToString())
