"""Graphs of one weight each, in the forms that quantizers write, with what ONNX's formula makes of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

NUM_INPUTS, NUM_OUTPUTS = 64, 48

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Stored:
    """A graph whose node "/layers.0/mlp/down_proj/MatMul" uses a weight, and the weight by the formula."""

    model: onnx.ModelProto
    matrix: Array


def to_nearest(model: onnx.ModelProto, bits: int, *, is_symmetric: bool = True) -> onnx.ModelProto:
    """The graph with its products in blocks of 32 numbers, by ONNX Runtime's tool."""
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=is_symmetric, bits=bits)
    quantizer = MatMulNBitsQuantizer(model, algo_config=config)
    quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    return made


def random_weight(seed: int = 0) -> Array:
    """[K, N] in float32."""
    return np.random.default_rng(seed).normal(0, 0.1, (NUM_INPUTS, NUM_OUTPUTS)).astype(np.float32)


def nbits(bits: int, block: int, *, has_zero_points: bool, dtype: type = np.float32, level: int = 0) -> Stored:
    """MatMulNBits: numbers [N, K / block, block * bits / 8], scales [N, K / block], zero points packed by rows."""
    rng, blocks = np.random.default_rng(bits), NUM_INPUTS // block
    numbers = rng.integers(0, 2**bits, (NUM_OUTPUTS, blocks, block)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.1, (NUM_OUTPUTS, blocks)).astype(dtype)
    zeros = rng.integers(0, 2**bits, (NUM_OUTPUTS, blocks)).astype(np.uint8)
    zeros = zeros if has_zero_points else np.full_like(zeros, 2 ** (bits - 1))
    tensors = {"w_Q": packed(numbers, bits), "w_scales": scales.reshape(-1) if level else scales}
    if has_zero_points:
        tensors["w_zp"] = packed(zeros, bits)
    node = helper.make_node(
        "MatMulNBits",
        ["x", *tensors],
        ["y"],
        f"/layers.0/mlp/down_proj/MatMul_Q{bits}",
        domain="com.microsoft",
        K=NUM_INPUTS,
        N=NUM_OUTPUTS,
        bits=bits,
        block_size=block,
        accuracy_level=level,
    )
    matrix = (numbers.astype(dtype) - zeros[..., None].astype(dtype)) * scales[..., None]
    return Stored(_model([node], tensors, dtype), matrix.reshape(NUM_OUTPUTS, NUM_INPUTS).T)


def packed(numbers: Array, bits: int) -> Array:
    """Numbers of `bits` bits along the last axis, the first of a byte in its lowest bits."""
    per_byte = 8 // bits
    missing = -numbers.shape[-1] % per_byte
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, missing)])
    parts = numbers.reshape(*numbers.shape[:-1], -1, per_byte)
    return (parts << (np.arange(per_byte, dtype=np.uint8) * bits)).sum(-1).astype(np.uint8)


def qdq(
    block: int | None,
    *,
    axis: int | None = None,
    transposed: bool = False,
    int4: bool = False,
    num_outputs: int = NUM_OUTPUTS,
) -> Stored:
    """DequantizeLinear before a MatMul (or a Gemm that transposes): per channel, or by blocks (of inputs)."""
    rng = np.random.default_rng(3)
    axis = int(not block) if axis is None else axis
    numbers = rng.integers(-8, 8, (NUM_INPUTS, num_outputs)).astype(np.int8)
    sizes = [size // block if block and axis == at else size for at, size in enumerate(numbers.shape)]
    scales = rng.uniform(0.01, 0.1, sizes if block else (num_outputs,)).astype(np.float32)
    matrix = numbers * (np.repeat(scales, block, axis) if block else scales)
    stored, attributes = numbers, {"axis": axis, **({"block_size": block} if block else {})}
    if transposed:
        stored, attributes = numbers.T.copy(), {"axis": 0}
    tensor = numpy_helper.from_array(stored, "w_quantized")
    if int4:
        tensor = helper.make_tensor("w_quantized", TensorProto.INT4, stored.shape, stored.reshape(-1).tolist())
    nodes = [
        helper.make_node("DequantizeLinear", ["w_quantized", "w_scale"], ["w"], "dequantize", **attributes),
        helper.make_node("Gemm", ["x", "w"], ["y"], "/layers.0/mlp/down_proj/MatMul", transB=1)
        if transposed
        else helper.make_node("MatMul", ["x", "w"], ["y"], "/layers.0/mlp/down_proj/MatMul"),
    ]
    model = _model(nodes, {"w_scale": scales}, np.float32)
    model.graph.initializer.append(tensor)
    return Stored(model, matrix.astype(np.float32))


def table(bits: int, block: int) -> Stored:
    """GatherBlockQuantized: rows of an embedding, packed along the last axis."""
    rng = np.random.default_rng(5)
    numbers = rng.integers(0, 2**bits, (NUM_INPUTS, NUM_OUTPUTS)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.1, (NUM_INPUTS, NUM_OUTPUTS // block)).astype(np.float32)
    tensors = {"w_Q": packed(numbers, bits), "w_scales": scales}
    node = helper.make_node(
        "GatherBlockQuantized",
        ["w_Q", "x", "w_scales"],
        ["y"],
        f"/layers.0/mlp/down_proj/MatMul_Q{bits}",
        domain="com.microsoft",
        gather_axis=0,
        quantize_axis=1,
        block_size=block,
        bits=bits,
    )
    matrix = (numbers.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(scales, block, 1)
    return Stored(_model([node], tensors, np.float32, TensorProto.INT64), matrix)


def experts(bits: int, block: int, *, has_zero_points: bool = False) -> tuple[onnx.ModelProto, Callable[..., Any]]:
    """QMoE of two experts with a fused SwiGLU; and what makes a MoE of the weights that it is given."""
    rng, hidden, inner, count = np.random.default_rng(bits + block), 64, 32, 2
    shapes = {"fc1": (count, 2 * inner, hidden), "fc2": (count, hidden, inner)}
    packed_ones: dict[str, Array] = {}
    for name, shape in shapes.items():
        blocks = shape[2] // block
        packed_ones[f"{name}_w"] = packed(rng.integers(0, 2**bits, shape).astype(np.uint8), bits)
        packed_ones[f"{name}_s"] = rng.uniform(0.01, 0.1, (*shape[:2], blocks)).astype(np.float32)
        if has_zero_points:
            packed_ones[f"{name}_z"] = packed(rng.integers(0, 2**bits, (*shape[:2], blocks)).astype(np.uint8), bits)
    shared = {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 1, "normalize_routing_weights": 1}
    zeros = ["fc1_z", "fc2_z"] if has_zero_points else []
    inputs = ["x", "route", "fc1_w", "fc1_s", "", "fc2_w", "fc2_s", "", "", "", "", *zeros]
    name, domain = "/layers.0/moe/{}", "com.microsoft"
    node = helper.make_node("QMoE", inputs, ["y"], name.format("QMoE"), domain=domain, **shared)
    node.attribute.extend(
        [helper.make_attribute("expert_weight_bits", bits), helper.make_attribute("block_size", block)]
    )

    def float_model(weights: dict[str, Array]) -> onnx.ModelProto:
        plain_node = helper.make_node(
            "MoE", ["x", "route", "fc1", "", "fc2", ""], ["y"], name.format("MoE"), domain=domain, **shared
        )
        return _routed(_model([plain_node], weights, np.float32))

    return _routed(_model([node], packed_ones, np.float32)), float_model


def _routed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with two columns of router logits as an input."""
    model.graph.input.append(helper.make_tensor_value_info("route", TensorProto.FLOAT, None))
    return model


def plain(matrix: Array, name: str = "/layers.0/mlp/down_proj/MatMul") -> onnx.ModelProto:
    """A MatMul with the weight as it is."""
    return _model([helper.make_node("MatMul", ["x", "w"], ["y"], name)], {"w": matrix}, matrix.dtype.type)


def _model(
    nodes: list[onnx.NodeProto], tensors: dict[str, Array], dtype: Callable[..., Any], input_type: int | None = None
) -> onnx.ModelProto:
    elem_type = input_type or helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = helper.make_tensor_value_info("x", elem_type, None)
    y = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
    initializers = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "one weight", [x], [y], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
