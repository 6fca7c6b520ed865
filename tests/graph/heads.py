"""Decoders reduced to their head: `hidden` [B, S, H] in, `logits` [B, S, V] and `present` out, as exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

H, V = 32, 48
_RNG = np.random.default_rng(7)
WEIGHT = _RNG.standard_normal((H, V)).astype(np.float32)
BIAS = _RNG.standard_normal(V).astype(np.float32)
BLOCK, SCALE = 16, np.float32(0.03)
BLOCKS = H // BLOCK

Node = onnx.NodeProto
Build = Callable[["Parts"], None]


class Parts:
    """Collects nodes and weights; values are chained by name."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def node(
        self, op: str, inputs: list[str], outputs: list[str] | str, domain: str = "", **attributes: object
    ) -> None:
        outputs = [outputs] if isinstance(outputs, str) else outputs
        self.nodes.append(
            helper.make_node(op, inputs, outputs, name=f"n{len(self.nodes)}", domain=domain, **attributes)
        )

    def weight(self, name: str, array: object, dtype: object = None) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def input(self, name: str, shape: list[object]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name


def model_of(
    parts: Parts,
    *,
    lead: tuple[object, ...] = ("B", "S"),
    opset: int = 21,
    elem_type: int = TensorProto.FLOAT,
    width: object = V,
    logits: str = "logits",
) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    outputs = [value(logits, elem_type, [*lead, width]), value("present", TensorProto.FLOAT, [*lead, H])]
    inputs = [value("hidden", TensorProto.FLOAT, [*lead, H]), *parts.inputs]
    graph = helper.make_graph(parts.nodes, "decoder", inputs, outputs, parts.weights)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def decoder(build: Build, **form: Any) -> onnx.ModelProto:
    """A model around the nodes that lead from `h` (twice `hidden`) to `logits`."""
    parts = Parts()
    parts.node("Add", ["hidden", "hidden"], "h")
    parts.node("Identity", ["h"], "present")
    build(parts)
    model = model_of(parts, **form)
    onnx.checker.check_model(model)
    return model


def matmul(p: Parts, out: str = "logits") -> None:
    p.node("MatMul", ["h", p.weight("w", WEIGHT)], out)


def matmul_transposed(p: Parts) -> None:
    p.node("Transpose", [p.weight("w", WEIGHT.T)], "wt", perm=[1, 0])
    p.node("MatMul", ["h", "wt"], "logits")


def matmul_of_half_weight(p: Parts) -> None:
    p.node("Cast", [p.weight("w", WEIGHT.astype(np.float16))], "w32", to=TensorProto.FLOAT)
    p.node("MatMul", ["h", "w32"], "logits")


def gemm(p: Parts) -> None:
    """As torch exports addmm: flattened, with the shape computed at run time."""
    p.node("Shape", ["h"], "shape")
    p.node("Gather", ["shape", p.weight("first", [0, 1], np.int64)], "lead")
    p.node("Concat", ["lead", p.weight("v", [V], np.int64)], "full", axis=0)
    p.node("Reshape", ["h", p.weight("flat", [-1, H], np.int64)], "h2")
    p.node("Gemm", ["h2", p.weight("w", WEIGHT.T), p.weight("b", BIAS)], "flat_logits", transB=1)
    p.node("Reshape", ["flat_logits", "full"], "logits")


def bias(p: Parts) -> None:
    matmul(p, "product")
    p.node("Add", [p.weight("b", BIAS), "product"], "logits")


def softcap(p: Parts) -> None:
    matmul(p, "product")
    p.node("Div", ["product", p.weight("cap", 3.0, np.float32)], "scaled")
    p.node("Tanh", ["scaled"], "squashed")
    p.node("Mul", ["squashed", "cap"], "logits")


def masked_tokens(p: Parts) -> None:
    """Logits clipped and unused tokens pushed down, as genai's builder does."""
    matmul(p, "product")
    penalty = np.where(np.arange(V) < 4, -1e4, 0).astype(np.float32)
    p.node("Add", ["product", p.weight("penalty", penalty.reshape(1, 1, V))], "masked")
    p.node("Clip", ["masked", p.weight("low", -50.0, np.float32), p.weight("high", 50.0, np.float32)], "logits")


def half(p: Parts) -> None:
    p.node("Cast", ["h"], "h16", to=TensorProto.FLOAT16)
    p.node("MatMul", ["h16", p.weight("w", WEIGHT.astype(np.float16))], "logits16")
    p.node("Cast", ["logits16"], "logits", to=TensorProto.FLOAT)


def half_logits(p: Parts) -> None:
    p.node("Cast", ["h"], "h16", to=TensorProto.FLOAT16)
    p.node("MatMul", ["h16", p.weight("w", WEIGHT.astype(np.float16))], "logits")


def fused_matmul(p: Parts) -> None:
    p.node("FusedMatMul", ["h", p.weight("w", WEIGHT.T)], "logits", domain="com.microsoft", transB=1, alpha=0.5)


def packed(bits: int) -> np.ndarray:
    """A weight as MatMulNBits stores it: uint8[V, blocks, bytes of a block]."""
    return _RNG.integers(0, 256, (V, BLOCKS, BLOCK * bits // 8), dtype=np.uint8)


def nbits(bits: int, level: int | None, *, weight: str = "", out: str = "logits") -> Build:
    """MatMulNBits at an accuracy level, of a weight of its own unless one is named."""

    def build(p: Parts) -> None:
        scales = p.weight("scales", np.full((V, BLOCKS), SCALE / bits))
        zeros = p.weight("zeros", np.full((V, BLOCKS * bits // 8), 0x88 if bits == 4 else 0x80, np.uint8))
        attributes = {"K": H, "N": V, "bits": bits, "block_size": BLOCK}
        attributes |= {} if level is None else {"accuracy_level": level}
        inputs = ["h", weight or p.weight("w", packed(bits)), scales, zeros]
        p.node("MatMulNBits", inputs, out, "com.microsoft", **attributes)

    return build


def tied_quantized(p: Parts, bits: int) -> None:
    """TieWordEmbeddings and ShareEmbeddingLmHead: the head reshapes the table that GatherBlockQuantized reads."""
    table = p.weight("embed", packed(bits).reshape(V, -1))
    p.node("Reshape", [table, p.weight("shape", [V, BLOCKS, -1], np.int64)], "w")
    nbits(bits, 4, weight="w")(p)
    ids = p.weight("ids", np.zeros((1, 1)), np.int64)
    attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    p.node("GatherBlockQuantized", [table, ids, "scales", "zeros"], "e", "com.microsoft", **attributes)


def tied_float(p: Parts) -> None:
    """TieWordEmbeddings on floats: Gemm over flattened rows, the shape cut and put together again."""
    p.node("Reshape", ["h", p.weight("flat", [-1, H], np.int64)], "h2")
    p.node("Gemm", ["h2", p.weight("embed", WEIGHT.T)], "flat_logits", alpha=1.0, beta=1.0, transA=0, transB=1)
    p.node("Shape", ["h"], "shape")
    bounds = [p.weight(name, [value], np.int64) for name, value in (("start", 0), ("end", -1), ("axis", 0), ("by", 1))]
    p.node("Slice", ["shape", *bounds], "lead")
    p.node("Concat", ["lead", p.weight("width", [V], np.int64)], "full", axis=0)
    p.node("Reshape", ["flat_logits", "full"], "logits")


def block_qdq(p: Parts) -> None:
    """MatMulNBitsToQDQ and the builder's use_qdq: a 4-bit weight dequantized by blocks."""
    integers = _RNG.integers(-8, 8, H * V)
    p.weights.append(helper.make_tensor("w", TensorProto.INT4, [H, V], integers))
    p.weights.append(helper.make_tensor("zeros", TensorProto.INT4, [BLOCKS, V], np.zeros(BLOCKS * V, np.int64)))
    scales = p.weight("scales", np.full((BLOCKS, V), SCALE))
    p.node("DequantizeLinear", ["w", scales, "zeros"], "w32", axis=0, block_size=BLOCK)
    p.node("MatMul", ["h", "w32"], "logits")


def bnb4(p: Parts) -> None:
    weight = p.weight("w", _RNG.integers(0, 256, H * V // 2, dtype=np.uint8))
    largest = p.weight("absmax", np.full(H * V // BLOCK, 0.3, np.float32))
    p.node("MatMulBnb4", ["h", weight, largest], "logits", "com.microsoft", K=H, N=V, block_size=BLOCK, quant_type=1)


def dequantized_weight(p: Parts) -> None:
    integers = np.clip(np.round(WEIGHT / 0.03), -127, 127).astype(np.int8)
    p.weight("w_scale", np.full(V, 0.03, np.float32))
    p.node("DequantizeLinear", [p.weight("w", integers), "w_scale"], "w32", axis=1)
    p.node("MatMul", ["h", "w32"], "logits")


def _quantized(p: Parts) -> tuple[str, str]:
    """Activations and a weight of 8 bits; returns the zero point and the weight."""
    integers = np.clip(np.round(WEIGHT / 0.03), -127, 127).astype(np.int8)
    zero = p.weight("zero", 0, np.int8)
    for name, scale in (("a_scale", 0.05), ("w_scale", 0.03), ("y_scale", 0.4)):
        p.weight(name, scale, np.float32)
    p.node("QuantizeLinear", ["h", "a_scale", zero], "hq")
    return zero, p.weight("w", integers)


def qdq(p: Parts) -> None:
    """Activation, weight and logits each after a pair of QuantizeLinear and DequantizeLinear."""
    zero, weight = _quantized(p)
    p.node("DequantizeLinear", ["hq", "a_scale", zero], "hd")
    p.node("DequantizeLinear", [weight, "w_scale", zero], "wd")
    p.node("MatMul", ["hd", "wd"], "product")
    p.node("QuantizeLinear", ["product", "y_scale", zero], "yq")
    p.node("DequantizeLinear", ["yq", "y_scale", zero], "logits")


def qlinear(p: Parts) -> None:
    zero, weight = _quantized(p)
    p.node("QLinearMatMul", ["hq", "a_scale", zero, weight, "w_scale", zero, "y_scale", zero], "yq")
    p.node("DequantizeLinear", ["yq", "y_scale", zero], "logits")


def variable_weight(p: Parts) -> None:
    p.node("MatMul", ["h", p.input("w_in", [H, V])], "logits")


def adapter(p: Parts) -> None:
    """A low-rank addition beside the product."""
    matmul(p, "product")
    p.node("MatMul", ["h", p.weight("down", WEIGHT[:, :4])], "low")
    p.node("MatMul", ["low", p.weight("up", WEIGHT[:4])], "delta")
    p.node("Add", ["product", "delta"], "logits")


def dynamic_integer(p: Parts) -> None:
    integers = np.clip(np.round(WEIGHT / 0.03), -127, 127).astype(np.int8)
    p.node("DynamicQuantizeLinear", ["h"], ["hq", "a_scale", "a_zero"])
    p.node("MatMulInteger", ["hq", p.weight("w", integers), "a_zero"], "product")
    p.node("Cast", ["product"], "product32", to=TensorProto.FLOAT)
    p.node("Mul", ["a_scale", p.weight("w_scale", 0.03, np.float32)], "scale")
    p.node("Mul", ["product32", "scale"], "logits")


def per_position_bias(p: Parts) -> None:
    """A constant that differs between positions: not the same for all rows."""
    matmul(p, "product")
    p.node("Add", ["product", p.weight("b", np.arange(5, dtype=np.float32).reshape(5, 1))], "logits")


def normalized(p: Parts) -> None:
    matmul(p, "product")
    p.node("Softmax", ["product"], "logits", axis=1)
