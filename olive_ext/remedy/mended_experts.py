"""The node of a layer's experts in another precision: QMoE with other bits and blocks, or the float graph's MoE.

Knows one node; how constants come into its graph is the caller's. Axes: E experts, K inputs and N outputs of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import TypeAlias

import onnx
from onnx import TensorProto, helper

from olive_ext.remedy.graph_file import Array
from olive_ext.remedy.pairing import Target
from olive_ext.remedy.precision import PackedWeight, Precision
from olive_ext.remedy.sources import Sources
from olive_ext.remedy.weights import WeightUse

Adding: TypeAlias = Callable[[str, tuple[int, ...], int, Callable[[], Iterator[Array]]], str]
"""Adds an initializer of a name like this, dims, ONNX's type and parts; gives its name."""

Taking: TypeAlias = Callable[[str, int], tuple[str, list[onnx.NodeProto]]]
"""Gives a constant of the float graph its name here, in ONNX's type, and the nodes that make it."""

_BIASES = (4, 7, 10)
"""The inputs of QMoE that are biases; MoE has each behind its weight."""

_FORM = ("expert_weight_bits", "block_size")


def experts_nodes(
    target: Target, precision: Precision, sources: Sources, take: Taking, add: Adding
) -> list[onnx.NodeProto]:
    """What takes the place of the QMoE whose weights `target` are, all of them; its other inputs stay."""
    if precision.bits:
        return [_packed_node(target, precision, sources, add)]
    old, node, nodes = target.quantized[0].node, deepcopy(target.floats[0].node), []
    biases = [old.input[n] if n < len(old.input) else "" for n in _BIASES]
    node.input[:] = [*old.input[:2], *(name for bias in biases for name in ("", bias))]
    node.output[:] = old.output
    for use, packed in zip(target.floats, target.quantized, strict=True):
        node.input[use.inputs[0]], made = take(use.value, sources.element_type(packed))
        nodes += made
    return [*nodes, node]


def _packed_node(target: Target, precision: Precision, sources: Sources, add: Adding) -> onnx.NodeProto:
    node = deepcopy(target.quantized[0].node)
    numbers = [n for use in target.quantized for n in use.inputs]
    node.input.extend([""] * (max(numbers) + 1 - len(node.input)))
    for own, use in zip(target.floats, target.quantized, strict=True):
        for n, name in zip(use.inputs, _packed(own, use, precision, sources, add), strict=True):
            node.input[n] = name
    kept = [one for one in node.attribute if one.name not in _FORM]
    del node.attribute[:]
    form = zip(_FORM, (precision.bits, precision.block_size), strict=True)
    node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in form)])
    return node


def _packed(own: WeightUse, use: WeightUse, precision: Precision, sources: Sources, add: Adding) -> list[str]:
    """Names of integers, scales, and zero points or "", for all experts; each has those of a product."""
    view = sources.weight(own)
    assert view is not None  # `Sources.offers`
    count = len(view())
    data_type = sources.element_type(use)
    is_symmetric = precision.bits == 8 or sources.is_symmetric(use)
    dtype = helper.tensor_dtype_to_np_dtype(data_type)

    def matrix(expert: int) -> Array:
        turned: Array = view()[expert].T
        return turned

    weights = [partial(matrix, expert) for expert in range(count)]
    experts = [PackedWeight(weight, dtype, precision, is_symmetric=is_symmetric) for weight in weights]

    def added(what: str, dims: tuple[int, ...], kind: int, part: Callable[[PackedWeight], Iterator[Array]]) -> str:
        return add(f"{own.value}{what}", (count, *dims), kind, lambda: (one for each in experts for one in part(each)))

    first = experts[0]
    row = first.packed_shape[1] * first.packed_shape[2]
    names = [
        added(f"_Q{precision.bits}", (first.packed_shape[0], row), TensorProto.UINT8, PackedWeight.packed),
        added("_scales", first.scales_shape, data_type, PackedWeight.scales),
    ]
    zeros = "" if is_symmetric else added("_zero_points", first.zeros_shape, TensorProto.UINT8, PackedWeight.zeros)
    return [*names, zeros]
