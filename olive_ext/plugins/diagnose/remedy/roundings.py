"""What is rounded beside weights: activations, after switches in the float graph, and the KV cache, in a graph of its
own.

A switch is a boolean that is bound as weights are: off, its value passes; on, what is read is rounded. Values of a
cache are rounded inside of the attention, after its rotary embedding, so no switch can be put before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from olive_ext.graph.edits import drop_shape_hints
from olive_ext.graph.nodes import NodeWriter, attribute, default_opset, layer_of
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import plain_name
from olive_ext.plugins.diagnose.remedy.pairing import Target, kind_of
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, Matrix

_ATTENTION = "GroupQueryAttention"
_ATTRIBUTES = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")
_CACHES = {3: 1, 4: 2}
"""The attention's inputs that are past keys and values, and the outputs that are present ones."""

_SCALES = (12, 13)


@dataclass(frozen=True, eq=False)
class QuantizedCache:
    """The KV cache of all layers, in integers."""

    pairs: tuple[tuple[str, onnx.NodeProto], ...]
    """By the float graph's node the quantized graph's attention."""

    name: str = "KV cache"
    kind: str = "KV cache"
    what: str = ", KV cache"
    part: str = ""
    layer: int | None = None
    is_alone: bool = True
    float_bytes: int = 0
    bytes: int = 0
    values: tuple[str, ...] = ()
    """Nothing is bound for it."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The quantized graph's nodes."""
        return tuple(node.name for _, node in self.pairs)

    def numbers(self, floats: GraphWeights, quantized: GraphWeights) -> Mapping[str, Matrix]:
        """Nothing is bound for it."""
        return {}


def quantized_cache(floats: GraphWeights, quantized: GraphWeights, unpaired: dict[str, str]) -> QuantizedCache | None:
    """The cache that the quantized graph keeps in integers and the float graph does not. Attention without a
    counterpart is named in `unpaired`; then there is no such target."""
    owns = {plain_name(node.name): node for node in floats.model.graph.node if node.op_type == _ATTENTION}
    pairs = []
    for node in filter(_is_quantized, quantized.model.graph.node):
        own = owns.get(plain_name(node.name))
        if own is None:
            unpaired[node.name] = "its cache is quantized, and the float graph has no attention of that name"
            return None
        if not _is_quantized(own):
            pairs.append((own.name, node))
    return QuantizedCache(tuple(pairs)) if pairs else None


def _is_quantized(node: onnx.NodeProto) -> bool:
    return node.op_type == _ATTENTION and attribute(node, _ATTRIBUTES[0], b"NONE") != b"NONE"


def with_cache(model: ResolvedModel, cache: QuantizedCache, quantized: GraphWeights) -> ResolvedModel:
    """The float model with that cache, in memory."""
    pairs = dict(cache.pairs)

    def edit(proto: onnx.ModelProto) -> None:
        for own in proto.graph.node:
            if own.name in pairs:
                _quantize(proto.graph, own, pairs[own.name], quantized)
        drop_shape_hints(proto.graph)

    return replace(model, edit_graph=edit)


def _quantize(graph: onnx.GraphProto, own: onnx.NodeProto, node: onnx.NodeProto, quantized: GraphWeights) -> None:
    """Gives an attention of the float graph the cache of the quantized graph's."""
    own.attribute.extend(one for one in node.attribute if one.name in _ATTRIBUTES)
    own.input.extend([""] * (max(_SCALES) + 1 - len(own.input)))
    for index in _SCALES:
        tensor = quantized.tensor(node.input[index])
        own.input[index] = tensor.name = f"{own.name}/olive_ext_scale_{index}"
        graph.initializer.append(tensor)
    given = {value.name: value for value in (*quantized.model.graph.input, *quantized.model.graph.output)}
    for past, present in _CACHES.items():
        names = {own.input[past]: node.input[past], own.output[present]: node.output[present]}
        for value in (*graph.input, *graph.output):
            if value.name in names:
                value.type.CopyFrom(given[names[value.name]].type)


_LARGEST, _LEAST = 127.0, 1e-30
_DOMAIN = "com.microsoft"


OUTPUT = -1


@dataclass(frozen=True)
class Site:
    """An input of a node of the float graph, or its output. The engine renames nodes that it moves: `weight` finds
    those, too."""

    node: str
    index: int
    """The index of the input; `OUTPUT` for the output."""

    weight: str = ""
    """The constant that the node multiplies by; empty for another node."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """Activations that the quantized model rounds before some of its nodes read them."""

    of: str
    """The float graph's node that reads them, or the first one."""

    nodes: tuple[str, ...]
    """The quantized graph's nodes that round, or read what is rounded."""

    sites: tuple[Site, ...]
    pair: tuple[onnx.NodeProto, ...] = ()
    """QuantizeLinear and DequantizeLinear, with constant scales and zero points. None where the reader itself rounds
    each row in blocks to 8 bits."""

    tensors: tuple[onnx.TensorProto, ...] = ()
    """The constants of `pair`."""

    block: int = 0
    elem_type: int = TensorProto.FLOAT
    """ONNX's type of the float graph's activations."""

    scale_type: int = TensorProto.FLOAT
    """ONNX's type of the scales of `pair`."""

    float_bytes: int = 0
    bytes: int = 0
    what: str = ", activations"
    part: str = ""

    @property
    def name(self) -> str:
        """The reader's name, which the weight's entry has, too, and what of it is meant."""
        return f"{self.of}{self.what}"

    @property
    def is_alone(self) -> bool:
        """Whether it is measured alone where nodes are: those of kernels lose so little that they are, by layers."""
        return bool(self.pair)

    @property
    def layer(self) -> int | None:
        """The decoder layer's number; None outside of the layers."""
        return layer_of(self.of)

    @property
    def kind(self) -> str:
        """The reader's name within its layer, e.g. "mlp/down_proj, activations"."""
        return f"{kind_of(self.of)}{self.what}"

    @property
    def values(self) -> tuple[str, ...]:
        """The switch."""
        return (f"{self.of}/{self.sites[0].index}/olive_ext_is_rounded",)

    def numbers(self, floats: GraphWeights, quantized: GraphWeights) -> dict[str, Matrix]:
        """The switch, on."""
        return {self.values[0]: np.array(True)}

    def choice(self, value: str, output: str, opset: int) -> onnx.NodeProto:
        """An If that gives `value` as it is, or rounded where the switch is on."""
        node = helper.make_node("If", self.values, [output], output)
        for branch, write in (("then_branch", self._rounded), ("else_branch", lambda writer, body, passed: passed)):
            made = helper.make_tensor_value_info(f"{output}/{branch}", self.elem_type, None)
            body = helper.make_graph([], branch, [], [made])
            writer = NodeWriter(body, opset, f"{output}/{branch}/of")
            writer.add("Cast", [write(writer, body, value)], made.name, to=self.elem_type)
            node.attribute.append(helper.make_attribute(branch, body))
        return node

    def _rounded(self, writer: NodeWriter, body: onnx.GraphProto, value: str) -> str:
        if not self.pair:
            return in_blocks(writer, value, self.block)
        names = {}
        for tensor in self.tensors:
            copy = body.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = names[tensor.name] = f"{body.output[0].name}/{tensor.name}"
        as_scale = writer.add("Cast", [value], to=self.scale_type)
        for node in self.pair:
            copied = deepcopy(node)
            copied.domain = _DOMAIN  # which has all types of numbers at every opset
            as_scale = writer.clone(copied, {**names, node.input[0]: as_scale})[node.output[0]]
        return as_scale


AnyTarget: TypeAlias = Target | Rounding | QuantizedCache
"""The things that are quantized alone: a weight, the activations that some nodes read, the KV cache."""


class Switches:
    """Writes roundings into a graph."""

    def __init__(self, roundings: Sequence[Rounding]) -> None:
        self._roundings = roundings
        self.missing: list[Rounding] = []
        """The roundings that lack a site in the graph that was edited last."""

    def edit(self, model: onnx.ModelProto) -> None:
        """Puts all roundings into a graph, in place, each with its switch as a constant that is off."""
        graph = model.graph
        by_name = {node.name: node for node in graph.node}
        by_weight = {node.input[1]: node for node in graph.node if len(node.input) > 1 and node.input[1]}
        if self._roundings and not any(entry.domain == _DOMAIN for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
        self.missing = []
        for rounding in self._roundings:
            (switch,) = rounding.values
            graph.initializer.append(numpy_helper.from_array(np.array(False), switch))
            found = [(by_name.get(site.node) or by_weight.get(site.weight), site.index) for site in rounding.sites]
            if any(node is None for node, _ in found):
                self.missing.append(rounding)
                continue
            chosen: dict[str, str] = {}
            for node, index in found:
                assert node is not None
                if index == OUTPUT:
                    node.output[0] = f"{(read := node.output[0])}/olive_ext_as_it_is"
                    graph.node.append(rounding.choice(node.output[0], read, default_opset(model)))
                    continue
                value = node.input[index]
                if value not in chosen:
                    name = chosen[value] = f"{switch}/{len(chosen)}"
                    graph.node.append(rounding.choice(value, name, default_opset(model)))
                node.input[index] = chosen[value]


def in_blocks(writer: NodeWriter, value: str, block: int) -> str:
    """Each block of the last axis as integers of 8 bits times the block's largest absolute number / 127, as ONNX
    Runtime's CPU kernels round what MatMulNBits of accuracy level 4 multiplies."""
    shape = writer.add("Shape", [value])
    width = writer.add("Gather", [shape, writer.integers([-1])], axis=0)
    rows = writer.add("Reshape", [value, writer.add("Concat", [writer.integers([-1]), width], axis=0)])
    size = writer.integers([block])
    behind = writer.add("Mod", [writer.add("Neg", [width]), size])
    ends = writer.add("Concat", [writer.integers([0, 0, 0]), behind], axis=0)
    padded = writer.add("Cast", [writer.add("Pad", [rows, ends])], to=TensorProto.FLOAT)
    blocks = writer.add("Reshape", [padded, writer.integers([-1, block])])
    largest = writer.reduce("ReduceMax", writer.add("Abs", [blocks]), keepdims=1)
    scale = writer.add("Max", [writer.add("Div", [largest, writer.number(_LARGEST)]), writer.number(_LEAST)])
    whole = writer.add("Round", [writer.add("Mul", [blocks, writer.add("Reciprocal", [scale])])])
    rounded = writer.add("Reshape", [writer.add("Mul", [whole, scale]), writer.add("Shape", [padded])])
    first, last = writer.integers([0]), writer.integers([1])
    cut = writer.add("Slice", [rounded, first, width, last])
    return writer.add("Reshape", [cut, shape])
