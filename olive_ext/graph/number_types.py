"""Which numbers a graph is made of: float, half precision, quantized. Reads names and types, no weight."""

from __future__ import annotations

import onnx
from onnx import TensorProto

_QUANTIZING = frozenset(
    (
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "GatherBlockQuantized",
        "MatMulBnb4",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QLinearMatMul",
        "QMoE",
    )
)
"""Operators of quantized weights and activations."""

_HALVES: dict[int, str] = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}


def quantizing_operator(model: onnx.ModelProto) -> str:
    """The first operator by which weights or activations are quantized; empty where there is none."""
    return next((node.op_type for node in model.graph.node if node.op_type in _QUANTIZING), "")


def half_type(model: onnx.ModelProto) -> str:
    """torch's name of the half precision of a graph's matrices; empty where none is in half precision."""
    types = (_HALVES.get(tensor.data_type) for tensor in model.graph.initializer if len(tensor.dims) > 1)
    return next(filter(None, types), "")
