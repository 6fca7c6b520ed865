"""Decoders reduced to their last layer: `hidden` [B, S, H] in, attention, and from its product `o` to `logits`.

The attention's keys are the output `present`, as decoders return them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.graph.heads import H, V, model_with

FF = 40
"""Width of the MLP."""

_RNG = np.random.default_rng(21)
SHAPES = {
    **dict.fromkeys(("w_q", "w_k", "w_o", "w_p"), (H, H)),
    "w_gate": (H, FF),
    "w_up": (H, FF),
    "w_down": (FF, H),
    "w_pair": (H, 2 * FF),
    "w_head": (H, V),
    "w_narrow": (H, 8),
    "w_back": (8, H),
    "w_down_turned": (H, FF),
}
VECTORS = {**dict.fromkeys(("g0", "g1", "g2", "b1", "b2", "b_o"), H), "b_up": FF, "g_small": H // 4}
WEIGHTS: dict[str, Any] = {
    **{name: (_RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in SHAPES.items()},
    **{name: _RNG.uniform(0.5, 1.5, size).astype(np.float32) for name, size in VECTORS.items()},
    "w16": (_RNG.standard_normal((H, H)) / 6).astype(np.float16),
    "w8": _RNG.integers(-90, 90, (H, H)).astype(np.int8),
    "packed": _RNG.integers(0, 256, (H, 1, 16), dtype=np.uint8),
    "packed_scales": np.full((H, 1), 0.05, np.float32),
    "scale": np.float32(0.02),
    "zero": np.int8(0),
    "w8_scale": np.float32(0.002),
    "eps": np.float32(1e-6),
    "unit": np.float32(1.0),
    "square": np.float32(2.0),
    "ones": np.ones((1, H), np.float32),
    "by_position": np.arange(5, dtype=np.float32).reshape(5, 1),
    "nothing": [0],
    "one": [1],
    "two": [2],
    "second": 2,
    "minus": [-1],
    "front": [-(2**31)],
    "middle": [FF // 2],
    "ff": [FF],
    "halves": [FF, FF],
    "flat": [-1, H],
    "flat_ff": [-1, FF],
    "rows": [0, H],
    "heads": [0, -1, H // 4],
    "whole": [0, -1, H],
}
INPUTS: dict[str, Sequence[int | str]] = {
    "mix": ["N", "N"],
    "per_layer": ["B", "S", 3, 8],
    "shared": [1, "S", H],
    "first": ["B", 1, H],
}
"""Weights and inputs that a layer's nodes may name."""

NORM = "n = SimplifiedLayerNormalization <axis: int = -1, epsilon = 1e-6> (hidden, g0)"
ATTENTION = """
    q = MatMul (n, w_q) present = MatMul (n, w_k)
    a = com.microsoft.MultiHeadAttention <num_heads = 4> (q, present, present)
"""
FLAT_ATTENTION = "present = Identity (n) a = MatMul (mix, n)"
"""Of `hidden` [N, H], as paged decoders have it; `mix` is what the attention gives each token of the others."""

LAYERS: dict[str, str] = {
    # As onnxruntime-genai's builder writes a layer: the sum before the norm is an output of it.
    "skip_norms": """
        m, , , sum = com.microsoft.SkipSimplifiedLayerNormalization (hidden, o, g1)
        gate = MatMul (m, w_gate) up = MatMul (m, w_up) s = Sigmoid (gate) silu = Mul (gate, s) act = Mul (silu, up)
        down = MatMul (act, w_down) f = com.microsoft.SkipSimplifiedLayerNormalization (sum, down, g2)
        logits = MatMul (f, w_head)
    """,
    # With biases of products and norms.
    "skip_layer_norms": """
        ob = Add (o, b_o) m, , , sum = com.microsoft.SkipLayerNormalization (hidden, ob, g1, b1)
        up = MatMul (m, w_up) act = com.microsoft.BiasGelu (up, b_up) down = MatMul (act, w_down)
        r = Add (sum, down) f = LayerNormalization (r, g2, b2) logits = MatMul (f, w_head)
    """,
    # As torch exports an RMS norm.
    "written_out_norm": """
        r = Add (hidden, o) squares = Pow (r, square) mean = ReduceMean <keepdims = 1> (squares, minus)
        shifted = Add (mean, eps) root = Sqrt (shifted) inverse = Div (unit, root) normed = Mul (r, inverse)
        m = Mul (g1, normed) up = MatMul (m, w_up) act = Gelu <approximate = "tanh"> (up)
        down = MatMul (act, w_down) out = Add (r, down) logits = MatMul (out, w_head)
    """,
    # Gate and up in one product, parted by Split, and by Slice; put together by Concat.
    "packed_mlp": """
        r = Add (hidden, o) pair = MatMul (r, w_pair) gate, up = Split <axis: int = -1> (pair, halves)
        activated = com.microsoft.QuickGelu <alpha = 1.0> (gate) act = Mul (activated, up)
        left = Slice (act, nothing, middle, two) right = Slice (act, middle, ff, two)
        turned = Concat <axis = 2> (right, left) down = MatMul (turned, w_down) out = Add (down, r)
        logits = MatMul (out, w_head)
    """,
    # As torch exports addmm: [B, S, W] to [B*S, W] and back, the shape computed at run time.
    "flattened_products": """
        r = Add (hidden, o) shape = Shape (r) lead = Slice (shape, nothing, two) r2 = Reshape (r, flat)
        up2 = Gemm (r2, w_up, b_up) wide = Concat <axis = 0> (lead, ff) up = Reshape (up2, wide) act = Tanh (up)
        act2 = Reshape (act, flat_ff) down2 = Gemm <transB = 1> (act2, w_down_turned, b_o)
        down2b = Reshape (down2, rows) narrow = Concat <axis = 0> (lead, minus) down = Reshape (down2b, narrow)
        out = Add (down, r) logits = MatMul (out, w_head)
    """,
    # The MLP reads what the attention reads, which is therefore needed whole.
    "parallel": """
        up = MatMul (n, w_up) act = com.microsoft.FastGelu (up) down = MatMul (act, w_down) both = Add (down, o)
        out = Add (both, hidden) logits = MatMul (out, w_head)
    """,
    # As Gemma 3n: one layer's part of a value [B, S, layers, D] comes in after the attention.
    "per_layer_embedding": """
        mine = Gather <axis = 2> (per_layer, second) r = Add (hidden, o) gate = MatMul (r, w_narrow)
        gated = Mul (gate, mine) back = MatMul (gated, w_back) out = Add (r, back) logits = MatMul (out, w_head)
    """,
    # MatMulNBits over float activations.
    "packed_weights": """
        r = Add (hidden, o)
        p = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 32> (r, packed, packed_scales)
        logits = MatMul (p, w_head)
    """,
    "half": """
        o16 = Cast <to = 10> (o) p16 = MatMul (o16, w16) p32 = Cast <to = 1> (p16) out = Add (p32, hidden)
        logits = MatMul (out, w_head)
    """,
    # Activations quantized with constant scales.
    "static_scales": """
        oq = QuantizeLinear (o, scale, zero) od = DequantizeLinear (oq, scale, zero) p = MatMul (od, w_p)
        out = Add (p, hidden) logits = MatMul (out, w_head)
    """,
    # Nothing is gained where the last product must stay.
    "norms_only": """
        mixed = Softmax <axis = 1> (o) f = SimplifiedLayerNormalization <axis: int = -1, epsilon = 1e-6> (mixed, g1)
        logits = MatMul (f, w_head)
    """,
    # The activations of all positions are quantized with one scale.
    "one_scale": """
        oq, of_all, offset = DynamicQuantizeLinear (o) product = MatMulInteger (oq, w8, offset)
        product32 = Cast <to = 1> (product) both = Mul (of_all, w8_scale) scaled = Mul (product32, both)
        out = Add (scaled, hidden) logits = MatMul (out, w_head)
    """,
    # A constant of which each position has another row.
    "different_positions": "out = Add (o, by_position) logits = MatMul (out, w_head)",
    "mean_of_positions": """
        mean = ReduceMean <keepdims = 1> (o, one) out = Sub (o, mean) logits = MatMul (out, w_head)
    """,
    "norm_of_positions": "out = LayerNormalization <axis = 1> (o, ones) logits = MatMul (out, w_head)",
    # Skip*LayerNormalization takes a sum of which all rows of the batch get the same.
    "shared_skip": """
        out = com.microsoft.SkipSimplifiedLayerNormalization (o, shared, g1) logits = MatMul (out, w_head)
    """,
    # A value without positions is added to all.
    "one_position": "out = Add (o, first) logits = MatMul (out, w_head)",
    # The positions come out in another order.
    "turned_positions": "out = Slice (o, minus, front, one, minus) logits = MatMul (out, w_head)",
    "given_shape": "out = Reshape (o, given) logits = MatMul (out, w_head)",
    # A reshape that makes four rows of one, and one of four again.
    "other_width": """
        small = Reshape (o, heads) normed = SimplifiedLayerNormalization <axis: int = -1> (small, g_small)
        out = Reshape (normed, whole) logits = MatMul (out, w_head)
    """,
}


def layer(name: str, **form: Any) -> onnx.ModelProto:
    """A model around a layer of `LAYERS`."""
    model = model_with(f"{NORM} {ATTENTION} o = MatMul (a, w_o) {LAYERS[name]}", WEIGHTS, INPUTS, **form)
    if name == "given_shape":
        model.graph.input.append(helper.make_tensor_value_info("given", TensorProto.INT64, [3]))
    return model


def flat_layer(name: str) -> onnx.ModelProto:
    """The same without an axis of rows."""
    return model_with(f"{NORM} {FLAT_ATTENTION} o = MatMul (a, w_o) {LAYERS[name]}", WEIGHTS, INPUTS, lead=("N",))
