"""The quantized model's KV cache in the float graph: one more target, in a graph of its own.

Values of a cache are rounded inside of the attention, behind its rotary embedding, so no switch can be put before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx

from olive_ext.graph.edits import drop_shape_hints
from olive_ext.graph.nodes import attribute
from olive_ext.model import ResolvedModel
from olive_ext.remedy.weights import GraphWeights, Matrix, plain_name

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

    @property
    def nodes(self) -> tuple[str, ...]:
        """The quantized graph's nodes."""
        return tuple(node.name for _, node in self.pairs)

    @property
    def values(self) -> tuple[str, ...]:
        """Nothing is bound for it."""
        return ()

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
