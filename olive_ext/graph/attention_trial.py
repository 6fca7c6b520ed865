"""Two models around one attention of a graph, as GroupQueryAttention and as PagedAttention, for random numbers to show
whether a device computes the same in both. Everything goes in and comes out in fp32. Knows no session.

Axes: S tokens of a text, N of all texts, D = heads x head size, H heads of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from olive_ext.graph.nodes import attribute, model_of
from olive_ext.graph.paged_attention import (
    AXIS,
    BOUNDS,
    PASTS,
    STARTS,
    TABLE,
    PackedInputs,
    PagedForm,
    first_axis,
    paged_nodes,
)

WINDOW = 4
"""Positions that windows are cut to, so that few tokens show them."""

LENGTHS = ("last", "total")
PAST = ("past_key", "past_value")
PRESENT = ("present_key", "present_value")
OUTPUT = "attended"

_ROTARY_AT, _POSITIONS_AT = 7, 9
_Shape = Sequence[int | str]


@dataclass(frozen=True)
class AttentionTrial:
    """`before` takes `inputs`, `PAST` [1, H, 0, size] and `LENGTHS` int32 [1] and []; `after` takes `inputs`, `PAST` in
    blocks, which it returns as `PRESENT`, and what a packed step has. Both return `OUTPUT` [1, S, D]."""

    before: bytes
    after: bytes
    inputs: Mapping[str, tuple[int, ...]]
    """Shapes in fp32. A 0 stands for the number of tokens."""

    elem_type: int
    """The cache's."""

    heads: int
    head_size: int


def attention_trials(model: onnx.ModelProto, inputs: PackedInputs, form: PagedForm) -> list[AttentionTrial]:
    """One for each kind of attention that has a cache of its own: its attributes, and which inputs it has."""
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found: dict[object, AttentionTrial] = {}
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention" or node.input[3] not in inputs.caches:
            continue
        heads, stored = inputs.caches[node.input[3]]
        present = tuple(bool(name) for name in node.input)
        kind = (tuple(sorted(entry.SerializeToString() for entry in node.attribute)), present, heads, stored)
        if kind not in found:
            found[kind] = _Trial(node, weights, (types[node.input[3]], heads, stored), form).build()
    return list(found.values())


class _Trial:
    def __init__(
        self, node: onnx.NodeProto, weights: Mapping[str, TensorProto], cache: tuple[int, int, int], form: PagedForm
    ) -> None:
        self._source = node
        self._weights = weights
        self._elem_type, self._heads, self._stored = cache
        self._form = form
        self._node = onnx.NodeProto()
        self._inputs: dict[str, tuple[int, ...]] = {}
        self._casts: list[onnx.NodeProto] = []

    def build(self) -> AttentionTrial:
        node = self._node
        node.CopyFrom(self._source)
        node.output[:] = ["narrow", *PRESENT]
        for entry in node.attribute:
            if entry.name == "local_window_size" and entry.i > 0:
                entry.i = WINDOW
        for place, name in enumerate(self._source.input):
            node.input[place] = self._input(place, name) if name else ""
        return AttentionTrial(
            self._model([node], [("last", [1]), ("total", [])], ["B", self._heads, "P", self._stored], ()),
            self._model(
                paged_nodes(node, node, self._form),
                [(TABLE, ["B", "blocks"]), (STARTS, ["B + 1"]), (PASTS, ["B"]), (BOUNDS, [3])],
                ["blocks", "block_size", self._heads, self._stored],
                PRESENT,
            ),
            self._inputs,
            self._elem_type,
            self._heads,
            self._stored,
        )

    def _input(self, place: int, name: str) -> str:
        """The name of the node's input number `place`, which the trial's model takes in its place."""
        if place in (3, 4, 5, 6):
            return (*PAST, *LENGTHS)[place - 3]
        if place == _POSITIONS_AT:
            return ""  # they are counted
        weight = self._weights.get(name)
        dtype = int(weight.data_type) if weight is not None else self._narrow
        shape = (1, 0, self._width(place)) if place < 3 else self._shape(place, weight)
        wide = f"input_{place}"
        self._inputs[wide] = shape
        self._casts.append(helper.make_node("Cast", [wide], [f"{wide}_narrow"], name=wide, to=dtype))
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
        if weight is not None:
            return tuple(weight.dims)
        if place in (_ROTARY_AT, _ROTARY_AT + 1):  # computed from the length
            return (64, self._stored // 2)
        return (1,)

    def _model(
        self,
        nodes: Iterable[onnx.NodeProto],
        integers: Sequence[tuple[str, _Shape]],
        cache: _Shape,
        presents: Iterable[str],
    ) -> bytes:
        value = helper.make_tensor_value_info
        inputs = [
            value(name, TensorProto.FLOAT, [size or "S" for size in shape]) for name, shape in self._inputs.items()
        ]
        inputs += [value(name, self._elem_type, cache) for name in PAST]
        nodes = [
            *self._casts,
            *nodes,
            helper.make_node("Cast", ["narrow"], [OUTPUT], name=OUTPUT, to=TensorProto.FLOAT),
        ]
        read = {name for node in nodes for name in node.input}
        inputs += [value(name, TensorProto.INT32, shape) for name, shape in integers if name in read]
        outputs = [value(OUTPUT, TensorProto.FLOAT, [1, "S", "D"])]
        outputs += [value(name, self._elem_type, cache) for name in presents]
        constants = [first_axis()] if AXIS in read else []
        graph = helper.make_graph(nodes, "attention", inputs, outputs, constants)
        return bytes(model_of(graph, 21, "com.microsoft").SerializeToString())
