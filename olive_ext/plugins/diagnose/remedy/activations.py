"""Which activations the quantized model rounds: pairs of QuantizeLinear and DequantizeLinear, and kernels that round
what they multiply. How a kernel rounds is not taken from its documentation: it is tried on the node itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from olive_ext.graph.nodes import NodeWriter, attribute
from olive_ext.model.files.constants import plain_name
from olive_ext.plugins.diagnose.remedy.pairing import Pairing, Target
from olive_ext.plugins.diagnose.remedy.roundings import OUTPUT, Rounding, Site, in_blocks
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, Matrix, WeightUse, computed

PROBE_ROWS = 4
"""Rows of random numbers that a node multiplies to show whether it rounds them."""

EXPLAINED = 0.25
"""Share of a node's error that may be left when its input is rounded beforehand, for the rounding to be taken for the
kernel's: 1e-4 are left where it is, and 1 or more where it is not."""

_LEVEL = 4
"""The accuracy level at which MatMulNBits rounds what it multiplies, where its kernel can."""


def static_roundings(pairing: Pairing, floats: GraphWeights, quantized: GraphWeights) -> Iterator[Rounding]:
    """The pairs of QuantizeLinear and DequantizeLinear of which both graphs have the nodes. The others are named in
    `pairing`."""
    nodes = quantized.model.graph.node
    for first in (node for node in nodes if node.op_type == "QuantizeLinear"):
        seconds = [one for one in nodes if one.op_type == "DequantizeLinear" and one.input[0] == first.output[0]]
        rounding = _static(first, seconds, floats, quantized)
        if isinstance(rounding, Rounding):
            yield rounding
        else:
            pairing.unpaired[first.name] = rounding


def kernels_roundings(targets: Iterable[Target], floats: GraphWeights, quantized: GraphWeights) -> Iterator[Rounding]:
    """Of products those that round what they multiply on the host; one of each form is tried."""
    tried: dict[tuple[object, ...], bool] = {}
    for target in targets:
        block = _block(target.quantized[0], quantized)
        if not block:
            continue
        node = target.quantized[0].node
        form = node.op_type, block, tuple((one.name, one.i) for one in node.attribute if one.name not in "NK")
        if form not in tried:
            tried[form] = _rounds_in_blocks(target.quantized[0], quantized, block)
        if tried[form]:
            sites = tuple(Site(own.node.name, 0, own.value) for own in target.floats)
            elem_type = _type_of(floats.matrix(target.floats[0]))
            yield Rounding(target.name, target.nodes, sites, block=block, elem_type=elem_type)


def _block(use: WeightUse, weights: GraphWeights) -> int:
    """The numbers of a row that a product would round with one scale, where it rounds what it multiplies; 0 where its
    form never does. ONNX Runtime makes a MatMulNBits of a product behind DequantizeLinear, too."""
    node = use.node
    if node.op_type == "MatMulNBits":
        return int(attribute(node, "block_size", 0)) if attribute(node, "accuracy_level", 0) == _LEVEL else 0
    maker = weights.maker.get(use.value)
    if node.op_type not in ("MatMul", "Gemm") or maker is None or maker.op_type != "DequantizeLinear":
        return 0
    return int(attribute(maker, "block_size", 0))


def _rounds_in_blocks(use: WeightUse, weights: GraphWeights, block: int) -> bool:
    """Whether a product on the host rounds each row that it multiplies, in blocks of so many numbers, to 8 bits."""
    matrix = weights.matrix(use)
    matrix = matrix.T if use.is_transposed else matrix
    rows = np.random.default_rng(0).normal(size=(PROBE_ROWS, len(matrix))).astype(matrix.dtype)
    graph = helper.make_graph([], "rounding", [], [])
    output = in_blocks(NodeWriter(graph, _OPSET.version, "rounded"), "x", block)
    rounded = computed(graph.node, graph.initializer, {"x": rows}, output, [_OPSET], 10)
    product, wide = weights.product(use, rows).astype(np.float32), matrix.astype(np.float32)
    plain, explained = (float(np.linalg.norm(product - given.astype(np.float32) @ wide)) for given in (rows, rounded))
    return explained < EXPLAINED * plain


_OPSET = helper.make_opsetid("", 18)


def _type_of(matrix: Matrix) -> int:
    return int(helper.np_dtype_to_tensor_dtype(matrix.dtype))


def _static(
    first: onnx.NodeProto, seconds: Sequence[onnx.NodeProto], floats: GraphWeights, quantized: GraphWeights
) -> Rounding | str:
    """The rounding that a pair is in the float graph, or why it is none there."""
    names = {name for node in (first, *seconds) for name in node.input[1:] if name}
    if not seconds or not names <= quantized.initializers.keys():
        return "its scale is not a constant, or integers are computed with"
    uses = {use.node.name: use for use in floats.uses.values() if use.inputs[0] == 1}
    sites = _output_site(first, quantized, uses) or _input_sites(seconds, floats, quantized, uses)
    if isinstance(sites, str):
        return sites
    tensors = tuple(quantized.tensor(name) for name in sorted(names))
    scale_type = quantized.initializers[first.input[1]].data_type
    weighed = [uses[site.node] for site in sites if site.weight]
    return Rounding(
        _place(sites[0]),
        tuple(node.name for node in (first, *seconds)),
        tuple(sites),
        (first, seconds[0]),
        tensors,
        elem_type=_type_of(floats.matrix(weighed[0])) if weighed else scale_type,
        scale_type=scale_type,
    )


def _output_site(first: onnx.NodeProto, quantized: GraphWeights, uses: Mapping[str, WeightUse]) -> list[Site]:
    """The float graph's product whose output is rounded for all that read it; none where it is another value."""
    value, maker = first.input[0], quantized.maker.get(first.input[0])
    own = None if maker is None else _named(maker, uses)
    graph = quantized.model.graph
    is_read = any(value in node.input for node in graph.node if node is not first)
    if own is None or is_read or any(value == output.name for output in graph.output):
        return []
    return [Site(own.node.name, OUTPUT, own.value)]


def _input_sites(
    seconds: Sequence[onnx.NodeProto], floats: GraphWeights, quantized: GraphWeights, uses: Mapping[str, WeightUse]
) -> list[Site] | str:
    """The inputs of the float graph's nodes that are rounded, or why they are not known."""
    own_names: dict[str, list[onnx.NodeProto]] = {}
    for node in floats.model.graph.node:
        own_names.setdefault(plain_name(node.name), []).append(node)
    outputs, sites = {node.output[0] for node in seconds}, []
    for node in quantized.model.graph.node:
        for index in (n for n, name in enumerate(node.input) if name in outputs):
            found = own_names.get(plain_name(node.name), [])
            if len(found) != 1 or len(found[0].input) <= index:
                return f"the float graph has no node '{node.name}' that reads it"
            use = None if index else uses.get(found[0].name)
            sites.append(Site(found[0].name, index, use.value if use is not None else ""))
    return sites or "no node reads it"


def _named(maker: onnx.NodeProto, uses: Mapping[str, WeightUse]) -> WeightUse | None:
    """The float graph's product that has the name of a node of the quantized graph."""
    wanted = plain_name(maker.name)
    return next((use for name, use in uses.items() if plain_name(name) == wanted), None)


def _place(site: Site) -> str:
    name = plain_name(site.node)
    return f"{name}, output" if site.index == OUTPUT else f"{name}, input {site.index}" if site.index else name
