"""Decoders reduced to their last layer: `hidden` [B, S, H] in, attention, and from its product `o` to `logits`.

The attention's keys are the output `present`, as decoders return them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.graph.heads import Build, H, Parts, V, model_of

FF = 40
"""Width of the MLP."""

_RNG = np.random.default_rng(21)


def weight(p: Parts, name: str, inner: int = H, columns: int = H) -> str:
    return p.weight(name, (_RNG.standard_normal((inner, columns)) / np.sqrt(inner)).astype(np.float32))


def vector(p: Parts, name: str, size: int = H) -> str:
    return p.weight(name, _RNG.uniform(0.5, 1.5, size).astype(np.float32))


def number(p: Parts, name: str, value: float) -> str:
    return p.weight(name, value, np.float32)


def norm(p: Parts, value: str, out: str) -> None:
    p.node("SimplifiedLayerNormalization", [value, vector(p, f"g_{out}")], out, axis=-1, epsilon=1e-6)


def head(p: Parts, value: str) -> None:
    p.node("MatMul", [value, weight(p, "w_head", H, V)], "logits")


def layer(build: Build, **form: Any) -> onnx.ModelProto:
    """A model around the nodes that `build` adds."""
    parts = Parts()
    norm(parts, "hidden", "n")
    parts.node("MatMul", ["n", weight(parts, "w_q")], "q")
    parts.node("MatMul", ["n", weight(parts, "w_k")], "present")
    parts.node("MultiHeadAttention", ["q", "present", "present"], "a", "com.microsoft", num_heads=4)
    parts.node("MatMul", ["a", weight(parts, "w_o")], "o")
    build(parts)
    return model_of(parts, **form)


def flat_layer(build: Build) -> onnx.ModelProto:
    """The same with `hidden` [N, H], as paged decoders have it; `mix` [N, N] is the attention."""
    parts = Parts()
    parts.input("mix", ["N", "N"])
    norm(parts, "hidden", "n")
    parts.node("Identity", ["n"], "present")
    parts.node("MatMul", ["mix", "n"], "a")
    parts.node("MatMul", ["a", weight(parts, "w_o")], "o")
    build(parts)
    return model_of(parts, lead=("N",))


def skip_norms(p: Parts) -> None:
    """As onnxruntime-genai's builder writes a layer: the sum before the norm is an output of it."""
    p.node("SkipSimplifiedLayerNormalization", ["hidden", "o", vector(p, "g1")], ["m", "", "", "sum"], "com.microsoft")
    p.node("MatMul", ["m", weight(p, "w_gate", H, FF)], "gate")
    p.node("MatMul", ["m", weight(p, "w_up", H, FF)], "up")
    p.node("Sigmoid", ["gate"], "s")
    p.node("Mul", ["gate", "s"], "silu")
    p.node("Mul", ["silu", "up"], "act")
    p.node("MatMul", ["act", weight(p, "w_down", FF, H)], "down")
    p.node("SkipSimplifiedLayerNormalization", ["sum", "down", vector(p, "g2")], "f", "com.microsoft")
    head(p, "f")


def skip_layer_norms(p: Parts) -> None:
    """With biases of products and norms."""
    p.node("Add", ["o", vector(p, "b_o")], "ob")
    inputs = ["hidden", "ob", vector(p, "g1"), vector(p, "b1")]
    p.node("SkipLayerNormalization", inputs, ["m", "", "", "sum"], "com.microsoft")
    p.node("MatMul", ["m", weight(p, "w_up", H, FF)], "up")
    p.node("BiasGelu", ["up", vector(p, "b_up", FF)], "act", "com.microsoft")
    p.node("MatMul", ["act", weight(p, "w_down", FF, H)], "down")
    p.node("Add", ["sum", "down"], "r")
    p.node("LayerNormalization", ["r", vector(p, "g2"), vector(p, "b2")], "f")
    head(p, "f")


def written_out_norm(p: Parts) -> None:
    """As torch exports an RMS norm."""
    p.node("Add", ["hidden", "o"], "r")
    p.node("Pow", ["r", number(p, "two", 2.0)], "squares")
    p.node("ReduceMean", ["squares", p.weight("last", [-1], np.int64)], "mean", keepdims=1)
    p.node("Add", ["mean", number(p, "eps", 1e-6)], "shifted")
    p.node("Sqrt", ["shifted"], "root")
    p.node("Div", [number(p, "one", 1.0), "root"], "inverse")
    p.node("Mul", ["r", "inverse"], "normed")
    p.node("Mul", [vector(p, "g1"), "normed"], "m")
    p.node("MatMul", ["m", weight(p, "w_up", H, FF)], "up")
    p.node("Gelu", ["up"], "act", approximate="tanh")
    p.node("MatMul", ["act", weight(p, "w_down", FF, H)], "down")
    p.node("Add", ["r", "down"], "out")
    head(p, "out")


def packed_mlp(p: Parts) -> None:
    """Gate and up in one product, parted by Split, and by Slice; put together by Concat."""
    p.node("Add", ["hidden", "o"], "r")
    p.node("MatMul", ["r", weight(p, "w_pair", H, 2 * FF)], "pair")
    p.node("Split", ["pair", p.weight("sizes", [FF, FF], np.int64)], ["gate", "up"], axis=-1)
    p.node("QuickGelu", ["gate"], "activated", "com.microsoft", alpha=1.0)
    p.node("Mul", ["activated", "up"], "act")
    bounds = [p.weight(name, [at], np.int64) for name, at in (("first", 0), ("middle", FF // 2), ("end", FF))]
    p.node("Slice", ["act", bounds[0], bounds[1], p.weight("axis", [2], np.int64)], "left")
    p.node("Slice", ["act", bounds[1], bounds[2], "axis"], "right")
    p.node("Concat", ["right", "left"], "turned", axis=2)
    p.node("MatMul", ["turned", weight(p, "w_down", FF, H)], "down")
    p.node("Add", ["down", "r"], "out")
    head(p, "out")


def flattened_products(p: Parts) -> None:
    """As torch exports addmm: [B, S, W] to [B*S, W] and back, the shape computed at run time."""
    p.node("Add", ["hidden", "o"], "r")
    p.node("Shape", ["r"], "shape")
    p.node("Slice", ["shape", p.weight("zero", [0], np.int64), p.weight("two", [2], np.int64)], "lead")
    p.node("Reshape", ["r", p.weight("flat", [-1, H], np.int64)], "r2")
    p.node("Gemm", ["r2", weight(p, "w_up", H, FF), vector(p, "b_up", FF)], "up2")
    p.node("Concat", ["lead", p.weight("ff", [FF], np.int64)], "wide", axis=0)
    p.node("Reshape", ["up2", "wide"], "up")
    p.node("Tanh", ["up"], "act")
    p.node("Reshape", ["act", p.weight("flat_ff", [-1, FF], np.int64)], "act2")
    p.node("Gemm", ["act2", weight(p, "w_down", H, FF), vector(p, "b_down")], "down2", transB=1)
    p.node("Reshape", ["down2", p.weight("keeps", [0, H], np.int64)], "down2b")
    p.node("Concat", ["lead", p.weight("h", [-1], np.int64)], "narrow", axis=0)
    p.node("Reshape", ["down2b", "narrow"], "down")
    p.node("Add", ["down", "r"], "out")
    head(p, "out")


def parallel(p: Parts) -> None:
    """The MLP reads what the attention reads, which is therefore needed whole."""
    p.node("MatMul", ["n", weight(p, "w_up", H, FF)], "up")
    p.node("FastGelu", ["up"], "act", "com.microsoft")
    p.node("MatMul", ["act", weight(p, "w_down", FF, H)], "down")
    p.node("Add", ["down", "o"], "both")
    p.node("Add", ["both", "hidden"], "out")
    head(p, "out")


def per_layer_embedding(p: Parts) -> None:
    """As Gemma 3n: one layer's part of a value [B, S, layers, D] comes in after the attention."""
    p.input("per_layer", ["B", "S", 3, 8])
    p.node("Gather", ["per_layer", p.weight("two", 2, np.int64)], "mine", axis=2)
    p.node("Add", ["hidden", "o"], "r")
    p.node("MatMul", ["r", weight(p, "w_gate", H, 8)], "gate")
    p.node("Mul", ["gate", "mine"], "gated")
    p.node("MatMul", ["gated", weight(p, "w_back", 8, H)], "back")
    p.node("Add", ["r", "back"], "out")
    head(p, "out")


def packed_weights(p: Parts) -> None:
    """MatMulNBits over float activations."""
    p.node("Add", ["hidden", "o"], "r")
    packed = _RNG.integers(0, 256, (H, 1, 16), dtype=np.uint8)
    inputs = ["r", p.weight("w_Q4", packed), p.weight("w_scales", np.full((H, 1), 0.05, np.float32))]
    p.node("MatMulNBits", inputs, "p", "com.microsoft", K=H, N=H, bits=4, block_size=32)
    head(p, "p")


def half(p: Parts) -> None:
    p.node("Cast", ["o"], "o16", to=TensorProto.FLOAT16)
    p.node("MatMul", ["o16", p.weight("w16", _RNG.standard_normal((H, H)) / 6, np.float16)], "p16")
    p.node("Cast", ["p16"], "p32", to=TensorProto.FLOAT)
    p.node("Add", ["p32", "hidden"], "out")
    head(p, "out")


def static_scales(p: Parts) -> None:
    """Activations quantized with constant scales."""
    zero = p.weight("zero", 0, np.int8)
    p.node("QuantizeLinear", ["o", number(p, "scale", 0.02), zero], "oq")
    p.node("DequantizeLinear", ["oq", "scale", zero], "od")
    p.node("MatMul", ["od", weight(p, "w_p")], "p")
    p.node("Add", ["p", "hidden"], "out")
    head(p, "out")


def norms_only(p: Parts) -> None:
    """Nothing is gained where the last product must stay."""
    p.node("Softmax", ["o"], "mixed", axis=1)
    norm(p, "mixed", "f")
    head(p, "f")


def one_scale(p: Parts) -> None:
    """The activations of all positions are quantized with one scale."""
    integers = _RNG.integers(-90, 90, (H, H)).astype(np.int8)
    p.node("DynamicQuantizeLinear", ["o"], ["oq", "scale", "zero"])
    p.node("MatMulInteger", ["oq", p.weight("w", integers), "zero"], "product")
    p.node("Cast", ["product"], "product32", to=TensorProto.FLOAT)
    p.node("Mul", ["scale", number(p, "w_scale", 0.002)], "both")
    p.node("Mul", ["product32", "both"], "scaled")
    p.node("Add", ["scaled", "hidden"], "out")
    head(p, "out")


def different_positions(p: Parts) -> None:
    """A constant of which each position has another row."""
    p.node("Add", ["o", p.weight("b", np.arange(5, dtype=np.float32).reshape(5, 1))], "out")
    head(p, "out")


def mean_of_positions(p: Parts) -> None:
    p.node("ReduceMean", ["o", p.weight("one", [1], np.int64)], "mean", keepdims=1)
    p.node("Sub", ["o", "mean"], "out")
    head(p, "out")


def norm_of_positions(p: Parts) -> None:
    scale = p.weight("g", np.ones((1, H), np.float32))
    p.node("LayerNormalization", ["o", scale], "out", axis=1)
    head(p, "out")


def shared_skip(p: Parts) -> None:
    """Skip*LayerNormalization takes a sum of which all rows of the batch get the same."""
    p.input("shared", [1, "S", H])
    p.node("SkipSimplifiedLayerNormalization", ["o", "shared", vector(p, "g1")], "out", "com.microsoft")
    head(p, "out")


def one_position(p: Parts) -> None:
    """A value without positions is added to all."""
    p.input("first", ["B", 1, H])
    p.node("Add", ["o", "first"], "out")
    head(p, "out")


def turned_positions(p: Parts) -> None:
    """The positions come out in another order."""
    ends = [
        p.weight(name, [at], np.int64) for name, at in (("last", -1), ("front", -(2**31)), ("one", 1), ("back", -1))
    ]
    p.node("Slice", ["o", *ends], "out")
    head(p, "out")


def given_shape(p: Parts) -> None:
    p.inputs.append(helper.make_tensor_value_info("given", TensorProto.INT64, [3]))
    p.node("Reshape", ["o", "given"], "out")
    head(p, "out")


def other_width(p: Parts) -> None:
    """A reshape that makes four rows of one, and one of four again."""
    p.node("Reshape", ["o", p.weight("heads", [0, -1, H // 4], np.int64)], "small")
    p.node("SimplifiedLayerNormalization", ["small", vector(p, "g1", H // 4)], "normed", axis=-1)
    p.node("Reshape", ["normed", p.weight("whole", [0, -1, H], np.int64)], "out")
    head(p, "out")
