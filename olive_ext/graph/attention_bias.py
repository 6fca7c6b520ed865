"""Gives ONNX Runtime's Attention operator the bias that it cannot do without: without one its CPU kernel crashes.

onnxruntime-genai's builder leaves a bias out where all of it is zero.
"""

from __future__ import annotations

import math

import onnx

_ITEM_BYTES: dict[int, int] = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.FLOAT16: 2, onnx.TensorProto.BFLOAT16: 2}


def with_attention_bias(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` itself, in which every com.microsoft Attention without a bias now has one of zeros."""
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.domain != "com.microsoft" or node.op_type != "Attention" or (len(node.input) > 2 and node.input[2]):
            continue
        weight = weights.get(node.input[1])
        if weight is None:
            continue
        bias = onnx.TensorProto(name=f"{weight.name}/olive_ext_no_bias", data_type=weight.data_type)
        bias.dims.append(weight.dims[-1])
        bias.raw_data = bytes(math.prod(bias.dims) * _ITEM_BYTES[weight.data_type])
        graph.initializer.append(bias)
        node.input[:] = [*node.input[:2], bias.name, *node.input[3:]]
    return model
