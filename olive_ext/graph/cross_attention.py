"""The part of an encoder-decoder's decoder that computes the cross-attention KV, cut out as a model of its own.

Knows exporters' decoders with and without an If over the past, but no session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
from onnx import helper

from olive_ext.graph.nodes import reads

_HAS_PAST = "use_cache_branch"
"""The input by which a merged decoder chooses between its two graphs."""


def cross_graph(model: onnx.ModelProto, outputs: Iterable[str]) -> onnx.ModelProto:
    """A new model that returns only `outputs` of `model` and holds only the nodes and weights that they need.

    Where the decoder is one If over the input 'use_cache_branch', the graph without a past is taken.
    """
    graph = model.graph
    nodes = [inlined for node in graph.node for inlined in _without_past(node)]
    weights = [*graph.initializer, *(item for body in _bodies(graph.node) for item in body.initializer)]
    needed = set(outputs)
    returned = [output for output in graph.output if output.name in needed]
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(reads([node]))  # names made inside subgraphs do no harm
            kept.append(node)
    cut = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    cut.opset_import.extend(model.opset_import)
    cut.functions.extend(model.functions)
    cut.graph.name = graph.name
    cut.graph.node.extend(reversed(kept))
    cut.graph.output.extend(returned)
    cut.graph.input.extend(item for item in graph.input if item.name in needed)
    cut.graph.initializer.extend(item for item in weights if item.name in needed)
    return cut


def _bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """The graphs without a past, of those of `nodes` that choose by the past."""
    for node in nodes:
        if node.op_type == "If" and node.input[0] == _HAS_PAST:
            yield next(entry.g for entry in node.attribute if entry.name == "else_branch")


def _without_past(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The node itself, or the nodes of its graph without a past, whose outputs keep the names of the node's outputs."""
    body = next(_bodies([node]), None)
    if body is None:
        yield node
        return
    yield from body.node
    for inner, outer in zip(body.output, node.output, strict=True):
        if inner.name != outer:
            yield helper.make_node("Identity", [inner.name], [outer])
