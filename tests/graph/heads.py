"""Decoders reduced to their head: `hidden` [B, S, H] in, `logits` [B, S, V] and `present` out, as exported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.graph.text import model_from

H, V = 32, 48
_RNG = np.random.default_rng(7)
WEIGHT = _RNG.standard_normal((H, V)).astype(np.float32)
BLOCK, SCALE = 16, np.float32(0.03)
BLOCKS = H // BLOCK

WEIGHTS: dict[str, Any] = {
    "w": WEIGHT,
    "w_turned": WEIGHT.T,
    "w16": WEIGHT.astype(np.float16),
    "w8": np.clip(np.round(WEIGHT / SCALE), -127, 127).astype(np.int8),
    "w4": helper.make_tensor("w4", TensorProto.INT4, [H, V], _RNG.integers(-8, 8, H * V)),
    "w4_zeros": helper.make_tensor("w4_zeros", TensorProto.INT4, [BLOCKS, V], np.zeros(BLOCKS * V, np.int64)),
    "w4_scales": np.full((BLOCKS, V), SCALE),
    "w_bnb4": _RNG.integers(0, 256, H * V // 2, dtype=np.uint8),
    "largest": np.full(H * V // BLOCK, 0.3, np.float32),
    "column_scales": np.full(V, SCALE),
    "a_scale": np.float32(0.05),
    "w_scale": SCALE,
    "y_scale": np.float32(0.4),
    "zero": np.int8(0),
    "b": _RNG.standard_normal(V).astype(np.float32),
    "by_position": np.arange(5, dtype=np.float32).reshape(5, 1),
    "cap": np.float32(3.0),
    "penalty": np.where(np.arange(V) < 4, -1e4, 0).astype(np.float32).reshape(1, 1, V),
    "low": np.float32(-50.0),
    "high": np.float32(50.0),
    "down": WEIGHT[:, :4],
    "up": WEIGHT[:4],
    "flat": [-1, H],
    "first": [0, 1],
    "v": [V],
    "start": [0],
    "end": [-1],
    "one": [1],
    "last": -1,
}
INPUTS: dict[str, Sequence[int | str]] = {"w_in": [H, V]}
"""Weights and inputs that a head's nodes may name."""

HEADS: dict[str, str] = {
    "matmul": "logits = MatMul (h, w)",
    "matmul_transposed": "turned = Transpose <perm = [1, 0]> (w_turned) logits = MatMul (h, turned)",
    "matmul_of_half_weight": "w32 = Cast <to = 1> (w16) logits = MatMul (h, w32)",
    # As torch exports addmm: flattened, with the shape computed at run time.
    "gemm": """
        shape = Shape (h) lead = Gather (shape, first) full = Concat <axis = 0> (lead, v) h2 = Reshape (h, flat)
        flat_logits = Gemm <transB = 1> (h2, w_turned, b) logits = Reshape (flat_logits, full)
    """,
    "bias": "product = MatMul (h, w) logits = Add (b, product)",
    "softcap": """
        product = MatMul (h, w) scaled = Div (product, cap) squashed = Tanh (scaled) logits = Mul (squashed, cap)
    """,
    # Logits clipped and unused tokens pushed down, as genai's builder does.
    "masked_tokens": "product = MatMul (h, w) masked = Add (product, penalty) logits = Clip (masked, low, high)",
    "half": "h16 = Cast <to = 10> (h) logits16 = MatMul (h16, w16) logits = Cast <to = 1> (logits16)",
    "half_logits": "h16 = Cast <to = 10> (h) logits = MatMul (h16, w16)",
    "fused_matmul": "logits = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (h, w_turned)",
    # TieWordEmbeddings on floats: Gemm over flattened rows, the shape cut and put together again.
    "tied_float": """
        h2 = Reshape (h, flat) flat_logits = Gemm <alpha = 1.0, beta = 1.0, transA = 0, transB = 1> (h2, w_turned)
        shape = Shape (h) lead = Slice (shape, start, end, start, one) full = Concat <axis = 0> (lead, v)
        logits = Reshape (flat_logits, full)
    """,
    # MatMulNBitsToQDQ and the builder's use_qdq: a 4-bit weight dequantized by blocks.
    "block_qdq": """
        w32 = DequantizeLinear <axis = 0, block_size = 16> (w4, w4_scales, w4_zeros) logits = MatMul (h, w32)
    """,
    "bnb4": "logits = com.microsoft.MatMulBnb4 <K = 32, N = 48, block_size = 16, quant_type = 1> (h, w_bnb4, largest)",
    "dequantized_weight": "w32 = DequantizeLinear <axis = 1> (w8, column_scales) logits = MatMul (h, w32)",
    # Activation, weight and logits each after a pair of QuantizeLinear and DequantizeLinear.
    "qdq": """
        hq = QuantizeLinear (h, a_scale, zero) hd = DequantizeLinear (hq, a_scale, zero)
        wd = DequantizeLinear (w8, w_scale, zero) product = MatMul (hd, wd)
        yq = QuantizeLinear (product, y_scale, zero) logits = DequantizeLinear (yq, y_scale, zero)
    """,
    "qlinear": """
        hq = QuantizeLinear (h, a_scale, zero)
        yq = QLinearMatMul (hq, a_scale, zero, w8, w_scale, zero, y_scale, zero)
        logits = DequantizeLinear (yq, y_scale, zero)
    """,
    "variable_weight": "logits = MatMul (h, w_in)",
    # A low-rank addition beside the product.
    "adapter": """
        product = MatMul (h, w) part = MatMul (h, down) delta = MatMul (part, up) logits = Add (product, delta)
    """,
    "dynamic_integer": """
        hq, scale, offset = DynamicQuantizeLinear (h) product = MatMulInteger (hq, w8, offset)
        product32 = Cast <to = 1> (product) both = Mul (scale, w_scale) logits = Mul (product32, both)
    """,
    # A constant that differs between positions: not the same for all rows.
    "per_position_bias": "product = MatMul (h, w) logits = Add (product, by_position)",
    "normalized": "product = MatMul (h, w) logits = Softmax <axis = 1> (product)",
}

Head = tuple[str, Mapping[str, Any]]
"""Nodes, and weights of their own."""


def nbits(bits: int, level: int | None, *, out: str = "logits", before: str = "", **weights: Any) -> Head:
    """MatMulNBits at an accuracy level, of a weight of its own unless `before` makes it."""
    packed = _RNG.integers(0, 256, (V, BLOCKS, BLOCK * bits // 8), dtype=np.uint8)
    scales = np.full((V, BLOCKS), SCALE / bits)
    zeros = np.full((V, BLOCKS * bits // 8), 0x88 if bits == 4 else 0x80, np.uint8)
    how = f"K = 32, N = 48, bits = {bits}, block_size = 16" + ("" if level is None else f", accuracy_level = {level}")
    nodes = f"{before} {out} = com.microsoft.MatMulNBits <{how}> (h, packed, scales, zeros)"
    return nodes, {**({} if before else {"packed": packed}), "scales": scales, "zeros": zeros, **weights}


def tied_quantized(bits: int) -> Head:
    """TieWordEmbeddings and ShareEmbeddingLmHead: the head reshapes the table that GatherBlockQuantized reads."""
    how = f"bits = {bits}, block_size = 16, gather_axis = 0, quantize_axis = 1"
    before = f"""
        packed = Reshape (table, parts)
        e = com.microsoft.GatherBlockQuantized <{how}> (table, ids, scales, zeros)
    """
    table = _RNG.integers(0, 256, (V, H * bits // 8), dtype=np.uint8)
    return nbits(bits, 4, before=before, table=table, parts=[V, BLOCKS, -1], ids=[[0]])


def model_with(
    nodes: str,
    weights: Mapping[str, Any],
    inputs: Mapping[str, Sequence[int | str]],
    *,
    lead: tuple[object, ...] = ("B", "S"),
    opset: int = 21,
    elem_type: int = TensorProto.FLOAT,
    width: object = V,
    logits: str = "logits",
) -> onnx.ModelProto:
    """A model of these nodes, with those of the weights and inputs that they name."""
    named = {*re.findall(r"\w+", nodes)}
    model = model_from(
        f"decoder () => () {{ {nodes} }}", opset, **{name: array for name, array in weights.items() if name in named}
    )
    value = helper.make_tensor_value_info
    given = {"hidden": [*lead, H], **{name: shape for name, shape in inputs.items() if name in named}}
    model.graph.input.extend(value(name, TensorProto.FLOAT, shape) for name, shape in given.items())
    returned = value(logits, elem_type, [*lead, width]), value("present", TensorProto.FLOAT, [*lead, H])
    model.graph.output.extend(returned)
    return model


def decoder(head: str | Head, **form: Any) -> onnx.ModelProto:
    """A model around a head of `HEADS`, or nodes that lead from `h` (twice `hidden`) to `logits`."""
    nodes, weights = (HEADS.get(head, head), {}) if isinstance(head, str) else head
    before = "h = Add (hidden, hidden) present = Identity (h)"
    model = model_with(f"{before} {nodes}", {**WEIGHTS, **weights}, INPUTS, **form)
    onnx.checker.check_model(model)
    return model
