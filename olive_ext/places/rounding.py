"""How coarsely a place rounds, and what that does to a model's numbers: the inputs of its products, moved at random by
as much as the rounding of any kernel amounts to. Knows no request.

A product's result, computed with rounding in any order, is the exact one of inputs that are moved by at most n u
relatively, and with high probability by a multiple of sqrt(n) u (Higham 2002, ch. 3; Higham and Mary 2019), with n
terms and the unit roundoff u. Kernels sum in blocks, of tiles and of vector lanes: sqrt(b + n / b) u.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from olive_ext.graph.nodes import attribute
from olive_ext.model import ResolvedModel

UNITS = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8, "8-bit activations": 2.0**-7}
"""Unit roundoff by what a place computes in. Of activations that are rounded to 8 bits in blocks: a step is 1/127 of
the largest, which is about three times the root mean square of a block."""

_MOST_TERMS = 256
"""sqrt(b + n / b) for n up to 16,384 terms in blocks b of 64 to 256 stays near sqrt(256)."""

_BLOCK_UNITS = ("float32", "tf32", "float16", "bfloat16")
_FLOATS = {1: "float32", 10: "float16", 16: "bfloat16"}
_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulBnb4")
_OPTIONS = {"fp16": "float16", "float16": "float16", "bf16": "bfloat16", "tf32": "tf32"}


def computed_in(model: ResolvedModel) -> str:
    """The coarsest of `UNITS` that a place rounds to: by its graph's weights, and by its providers' options."""
    if model.kind == "hf":
        dtype = model.settings.dtype
        return dtype if dtype in UNITS else "bfloat16"
    graph = model.decoder_graph().graph
    types = {_FLOATS[one.data_type] for one in graph.initializer if one.data_type in _FLOATS and len(one.dims) > 1}
    for provider in model.providers:
        for name, value in dict(provider.options).items():
            if str(value).lower() not in ("0", "false", ""):
                types |= {unit for word, unit in _OPTIONS.items() if word in f"{name} {value}".lower()}
    if model.spec.rounds_rows or any(attribute(node, "accuracy_level", 0) == 4 for node in graph.node):
        types.add("8-bit activations")
    return coarser(*types)


def coarser(*names: str) -> str:
    """The one with the largest unit roundoff; float32 of none."""
    return max(("float32", *names), key=lambda name: UNITS.get(name, 0.0))


def move_inputs(model: Any, unit: str, seed: int) -> None:
    """Puts a multiplication by 1 + e before every product with weights in `model` (onnx.ModelProto), e drawn for each
    column of the product's input from a normal distribution with a standard deviation of sqrt(n) u. Raises `ValueError`
    where there is no such product."""
    from onnx import TensorProto, helper, numpy_helper

    graph, rng = model.graph, np.random.default_rng(seed)
    shapes = {one.name: tuple(one.dims) for one in graph.initializer}
    kinds = {one.name: one.data_type for one in graph.initializer}
    sources = {output: node for node in graph.node for output in node.output}
    nodes, moved = [], 0
    for number, node in enumerate(graph.node):
        columns = _columns(node, shapes, sources) if node.op_type in _PRODUCTS else 0
        if columns:
            spread = UNITS[unit] * (math.sqrt(min(columns, _MOST_TERMS)) if unit in _BLOCK_UNITS else 1.0)
            elem_type = _type_of(node, kinds, sources)
            factors = helper.np_dtype_to_tensor_dtype(np.dtype(np.float32))
            name = f"olive_ext_moved_{number}"
            values = (1 + spread * rng.standard_normal(columns)).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(values, f"{name}_float"))
            factor = f"{name}_float"
            if elem_type != factors:
                factor = f"{name}_factor"
                nodes.append(helper.make_node("Cast", [f"{name}_float"], [factor], to=elem_type, name=f"{name}_cast"))
            nodes.append(helper.make_node("Mul", [node.input[0], factor], [name], name=name))
            node.input[0] = name
            moved += 1
        nodes.append(node)
    if not moved:
        raise ValueError("its graph has no product with weights")
    assert TensorProto.FLOAT == 1
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _columns(node: Any, shapes: dict[str, tuple[int, ...]], sources: dict[str, Any]) -> int:
    """Columns of the input that a product with weights sums over; 0 where it has none, or they are not known."""
    if node.op_type in ("MatMulNBits", "MatMulBnb4"):
        return int(attribute(node, "K", 0))
    name, is_turned = node.input[1], bool(attribute(node, "transB", 0))
    while name not in shapes and name in sources and sources[name].op_type in ("DequantizeLinear", "Cast", "Transpose"):
        is_turned ^= sources[name].op_type == "Transpose"
        name = sources[name].input[0]
    shape = shapes.get(name, ())
    return 0 if len(shape) != 2 else shape[1 if is_turned else 0]


def _type_of(node: Any, kinds: dict[str, int], sources: dict[str, Any]) -> int:
    """The element type of a product's input: that of its weights, or of what scales them."""
    names = [*node.input[1:]]
    while names:
        name = names.pop(0)
        if kinds.get(name) in _FLOATS:
            return kinds[name]
        if name in sources and sources[name].op_type in ("DequantizeLinear", "Cast", "Transpose"):
            source = sources[name]
            if source.op_type == "Cast":
                return int(attribute(source, "to", 1))
            names += source.input
    return 1
