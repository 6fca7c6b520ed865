"""What is rounded beside weights: activations, by switches in the float graph.

A switch is a boolean that is bound as weights are: off, its value passes; on, the value is rounded before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from olive_ext.graph.nodes import NodeWriter, attribute, default_opset, layer_of
from olive_ext.model.files.constants import plain_name
from olive_ext.plugins.diagnose.remedy.pairing import Target, kind_of
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, Matrix


def quantized_caches(floats: GraphWeights, quantized: GraphWeights) -> dict[str, str]:
    """The quantized graph's attention that keeps its KV cache in integers, and the float graph's does not, with why it
    is no entry: the cache is rounded inside of the attention, after its rotary embedding, before which no switch can
    be put."""
    whole = {plain_name(node.name) for node in floats.model.graph.node if _has_quantized_cache(node)}
    names = [node.name for node in quantized.model.graph.node if _has_quantized_cache(node)]
    why = "its KV cache is quantized: its loss is in what other kernels add"
    return {name: why for name in names if plain_name(name) not in whole}


def _has_quantized_cache(node: onnx.NodeProto) -> bool:
    return node.op_type == "GroupQueryAttention" and attribute(node, "k_quant_type", b"NONE") != b"NONE"


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
    """The quantized graph's nodes that round."""

    sites: tuple[Site, ...]
    pair: tuple[onnx.NodeProto, onnx.NodeProto]
    """QuantizeLinear and DequantizeLinear, with constant scales and zero points."""

    tensors: tuple[onnx.TensorProto, ...]
    """The constants of `pair`."""

    elem_type: int
    """ONNX's type of the float graph's activations."""

    scale_type: int
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


AnyTarget: TypeAlias = Target | Rounding
"""What is quantized alone: a weight, or the activations that some nodes read."""


def put_switches(model: onnx.ModelProto, roundings: Sequence[Rounding]) -> list[Rounding]:
    """Puts all roundings into a graph, in place, each with its switch as a constant that is off. Gives those that lack
    a site there."""
    graph = model.graph
    by_name = {node.name: node for node in graph.node}
    by_weight = {node.input[1]: node for node in graph.node if len(node.input) > 1 and node.input[1]}
    if roundings and not any(entry.domain == _DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    missing: list[Rounding] = []
    for rounding in roundings:
        (switch,) = rounding.values
        graph.initializer.append(numpy_helper.from_array(np.array(False), switch))
        sites = [(by_name.get(site.node) or by_weight.get(site.weight), site.index) for site in rounding.sites]
        if any(node is None for node, _ in sites):
            missing.append(rounding)
            continue
        chosen: dict[str, str] = {}
        for node, index in sites:
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
    return missing
