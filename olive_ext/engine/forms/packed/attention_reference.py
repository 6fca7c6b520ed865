"""Causal attention of a PagedAttention node computed on the host in float32, by its definition: what a device's
kernels are held against. Knows no session and no cache.

Axes: S tokens of one text, Q heads of queries, H of keys, D head size, R half of the rotated part.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from olive_ext.engine.step import FloatArray
from olive_ext.graph.nodes import attribute

QUERY, KEY, VALUE, COS, SIN, SINK, Q_NORM, K_NORM = 0, 1, 2, 8, 9, 11, 12, 13
"""Places of the node's inputs."""

FLOATS = (1, 10, 16)
"""Element types of caches that keep keys and values as they are."""

SCALE = 1 / 16
"""Of a quantized cache."""


def attended(
    node: onnx.NodeProto,
    values: Mapping[int, FloatArray],
    heads: int,
    head_size: int,
    elem_type: int = FLOATS[0],
) -> FloatArray:
    """What `node` returns [S, Q D] for a text behind no past. `values`: its inputs by place, tokens as [S, width];
    `heads`: H; `elem_type`: the cache's; one that is quantized has `SCALE`."""
    num_queries = int(attribute(node, "num_heads", 0))
    tokens_SW = np.concatenate([values[place] for place in (QUERY, KEY, VALUE) if place in values], axis=1)
    parts = np.split(tokens_SW.reshape(len(tokens_SW), -1, head_size), [num_queries, num_queries + heads], axis=1)
    q_QSD, k_HSD, v_HSD = (part.swapaxes(0, 1) for part in parts)
    epsilon = float(attribute(node, "qk_norm_epsilon", 1e-6))
    q_QSD, k_HSD = _normed(q_QSD, values.get(Q_NORM), epsilon), _normed(k_HSD, values.get(K_NORM), epsilon)
    if attribute(node, "do_rotary", 0):
        is_interleaved = bool(attribute(node, "rotary_interleaved", 0))
        q_QSD, k_HSD = (rotated(part, values[COS], values[SIN], is_interleaved) for part in (q_QSD, k_HSD))
    q_QSD, k_HSD, v_HSD = q_QSD * score_scale(node, head_size), _stored(k_HSD, elem_type), _stored(v_HSD, elem_type)
    softcap, sink_Q = float(attribute(node, "softcap", 0.0)), values.get(SINK)
    visible_SS = visible(len(tokens_SW), int(attribute(node, "local_window_size", -1)))
    found_QSD = np.empty_like(q_QSD)
    for i, q_SD in enumerate(q_QSD):
        group = i * heads // num_queries
        scores_SS = q_SD @ k_HSD[group].T
        if softcap:
            scores_SS = softcap * np.tanh(scores_SS / softcap)
        scores_SS = np.where(visible_SS, scores_SS, -np.inf)
        sink = -np.inf if sink_Q is None else float(sink_Q.ravel()[i])
        top_S1 = np.maximum(scores_SS.max(axis=1, keepdims=True), sink)
        shares_SS = np.exp(scores_SS - top_S1)
        found_QSD[i] = shares_SS @ v_HSD[group] / (shares_SS.sum(axis=1, keepdims=True) + np.exp(sink - top_S1))
    return np.asarray(found_QSD.swapaxes(0, 1)).reshape(len(tokens_SW), -1)


def rounded(value: FloatArray, elem_type: int) -> FloatArray:
    """`value` as numbers of that type."""
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    return np.asarray(np.asarray(value, np.float32).astype(dtype), np.float32)


def _stored(part: FloatArray, elem_type: int) -> FloatArray:
    if elem_type in FLOATS:
        return part
    codes = part / SCALE
    is_whole = np.issubdtype(helper.tensor_dtype_to_np_dtype(elem_type), np.integer)
    return np.asarray(rounded(np.rint(codes).clip(-128, 127) if is_whole else codes, elem_type) * SCALE, np.float32)


def score_scale(node: onnx.NodeProto, head_size: int) -> float:
    """What the products of queries and keys are multiplied by."""
    return float(attribute(node, "scale", 0.0)) or float(head_size**-0.5)


def visible(length: int, window: int) -> np.ndarray:
    """Whether a token [S] sees a position [S]."""
    distances_SS = np.arange(length)[:, None] - np.arange(length)
    return np.asarray((distances_SS >= 0) & ((distances_SS < window) | (window <= 0)))


def _normed(part: FloatArray, weight: FloatArray | None, epsilon: float) -> FloatArray:
    """Divided by the root of the mean square of each head, times `weight` [D]."""
    if weight is None:
        return part
    return np.asarray(part / np.sqrt(np.square(part).mean(axis=-1, keepdims=True) + epsilon) * weight, np.float32)


def rotated(part: FloatArray, cos_SR: FloatArray, sin_SR: FloatArray, is_interleaved: bool) -> FloatArray:
    """The first 2 R numbers of each head as R points in the plane, turned by the angle of their position."""
    half = cos_SR.shape[1]
    cos, sin = cos_SR[: part.shape[1]], sin_SR[: part.shape[1]]
    at = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if is_interleaved else (slice(half), slice(half, 2 * half))
    first, second = (part[..., place] for place in at)
    turned = np.array(part, np.float32)
    turned[..., at[0]] = first * cos - second * sin
    turned[..., at[1]] = second * cos + first * sin
    return turned
