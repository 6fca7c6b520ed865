"""A graph with attention over a paged cache computes what it computed with GroupQueryAttention.

There is no CPU kernel for PagedAttention, so it is written here from its documentation, in numpy; GroupQueryAttention
is ONNX Runtime's.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from olive_ext.engine.forms.paged_attention import KERNELS, pack_inputs, with_paged_attention
from olive_ext.engine.runners.runner import NotFittingError
from olive_ext.model.types import KvTensor
from tests.graph.text import model_from, session_of

HEADS, KV_HEADS, SIZE, CONTEXT, BLOCK = 4, 2, 16, 32, 4
WIDTH, KV_WIDTH = HEADS * SIZE, KV_HEADS * SIZE
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
CACHES = {name: KvTensor(name, "", FLOAT, KV_HEADS, SIZE) for name in ("past_k", "past_v")}
INPUTS = CACHES, ["ids"], ["mask"]
CUDA = KERNELS["cuda"]


GRAPH = """
decoder (int64[B, S] ids, int64[B, T] mask, float[B, 2, P, 16] past_k, float[B, 2, P, 16] past_v)
=> (float[B, S, 64] out, float[B, 2, T, 16] new_k, float[B, 2, T, 16] new_v) {{
    q_rows = Gather (q, ids) k_rows = Gather (k, ids) v_rows = Gather (v, ids)
    sum = ReduceSum <keepdims = 0> (mask, axis) last_64 = Sub (sum, one) last = Cast <to = 6> (last_64)
    shape = Shape (mask) total_64 = Gather (shape, one) total = Cast <to = 6> (total_64)
    {first}, new_k, new_v = com.microsoft.GroupQueryAttention <{how}>
        (q_rows, k_rows, v_rows, past_k, past_v, last, total, cos, sin{more})
    {second}
}}
"""
SECOND = """
    no_k = Slice (k_rows, nothing, nothing, axis) no_v = Slice (v_rows, nothing, nothing, axis)
    out = com.microsoft.GroupQueryAttention <{how}> (first, no_k, no_v, new_k, new_v, last, total, cos, sin)
"""


def _model(*, is_shared: bool = False, more: str = "", **changes: Any) -> onnx.ModelProto:
    """Token ids to `out`: embeddings, one attention over a cache, and a second one over the same cache where
    `is_shared`, whose own keys and values are empty."""
    rng = np.random.default_rng(3)
    angles = np.arange(CONTEXT)[:, None] / 100 ** (np.arange(0, SIZE, 2) / SIZE)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles), "sink": rng.standard_normal(HEADS)}
    widths = {"q": WIDTH, "k": KV_WIDTH, "v": KV_WIDTH}
    tables |= {name: rng.standard_normal((50, width)) for name, width in widths.items()}
    settings = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1, **changes}
    how = ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    parts = {"first": "first", "second": SECOND.format(how=how)} if is_shared else {"first": "out", "second": ""}
    numbers = {"one": 1, "axis": [1], "nothing": [0]}
    weights = {name: array.astype(np.float32) for name, array in tables.items()}
    return model_from(GRAPH.format(how=how, more=more, **parts), **weights, **numbers)


def _alone(model: onnx.ModelProto, ids: list[int]) -> np.ndarray:
    """[S, D], the text in one row behind nothing."""
    nothing = np.zeros((1, KV_HEADS, 0, SIZE), np.float32)
    feeds = {"ids": np.array([ids]), "mask": np.ones((1, len(ids)), np.int64), "past_k": nothing, "past_v": nothing}
    return session_of(model).run(["out"], feeds)[0][0]


def _rotated(x_NHD: np.ndarray, positions_N: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    left, right = np.split(x_NHD, 2, axis=-1)
    c, s = cos[positions_N][:, None], sin[positions_N][:, None]
    return np.concatenate([left * c - right * s, right * c + left * s], axis=-1)


class PagedAttention(OpRun):
    """As documented for com.microsoft.PagedAttention: packed tokens are written into blocks, then attended to."""

    op_domain = "com.microsoft"

    def _run(self, *inputs: Any, **settings: Any) -> tuple[np.ndarray, ...]:
        q, k, v, key_cache, value_cache, starts, pasts, table, cos, sin, *rest = inputs
        assert rest[:1] in ([], [None])
        sink = rest[1] if len(rest) > 1 else None
        lengths = np.diff(starts)
        positions = np.concatenate([past + np.arange(length) for past, length in zip(pasts, lengths, strict=True)])
        rows = np.repeat(np.arange(len(pasts)), lengths)
        q = _rotated(q.reshape(-1, HEADS, SIZE), positions, cos, sin)
        k = _rotated(k.reshape(-1, KV_HEADS, SIZE), positions, cos, sin)
        for row, position, key, value in zip(rows, positions, k, v.reshape(k.shape), strict=True):
            key_cache[table[row, position // BLOCK], position % BLOCK] = key
            value_cache[table[row, position // BLOCK], position % BLOCK] = value
        out = [
            self._attend(query, _held(key_cache, table[row]), _held(value_cache, table[row]), position, sink, settings)
            for row, position, query in zip(rows, positions, q, strict=True)
        ]
        return np.array(out, np.float32), key_cache, value_cache

    def _attend(self, q, keys, values, position, sink, settings) -> np.ndarray:  # type: ignore[no-untyped-def]
        window = settings.get("local_window_size") or -1
        first = max(0, position + 1 - window) if window > 0 else 0
        keys, values = (np.repeat(x[first : position + 1], HEADS // KV_HEADS, axis=1) for x in (keys, values))
        scores_HT = np.einsum("hd,thd->ht", q, keys) * (settings.get("scale") or SIZE**-0.5)
        if cap := settings.get("softcap"):
            scores_HT = cap * np.tanh(scores_HT / cap)
        terms_HT = np.exp(scores_HT)
        total_H = terms_HT.sum(1) + (np.exp(sink) if sink is not None else 0)
        return np.einsum("ht,thd->hd", terms_HT / total_H[:, None], values).reshape(-1)


def _held(cache: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    return cache[blocks].reshape(-1, KV_HEADS, SIZE)


class Blocks:
    """A paged graph and its blocks."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = ReferenceEvaluator(model, new_ops=[PagedAttention])
        self._pools = {name: np.full((6, BLOCK, KV_HEADS, SIZE), np.nan, np.float32) for name in CACHES}

    def run(self, rows: list[tuple[list[int], int, list[int]]]) -> np.ndarray:
        """[N, D] of a packed step; each row has tokens, a past and blocks."""
        lengths = [len(tokens) for tokens, _, _ in rows]
        table = np.zeros((len(rows), 4), np.int32)
        for number, (_, _, blocks) in enumerate(rows):
            table[number, : len(blocks)] = blocks
        feeds = {
            "ids": np.array([token for tokens, _, _ in rows for token in tokens]),
            "block_table": table,
            "cumulative_sequence_lengths": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            "past_sequence_lengths": np.array([past for _, past, _ in rows], np.int32),
            "attention_metadata": np.array([9, 9, 9], np.int32),
        }
        out, *pools = self._graph.run(None, {**feeds, **self._pools})
        self._pools = dict(zip(CACHES, pools, strict=True))
        return out[0]


def test_what_only_the_mask_was_for_is_cut_off() -> None:
    model = with_paged_attention(_model(), *INPUTS, CUDA)
    graph = model.graph
    assert "mask" not in {value.name for value in graph.input}
    assert not {"ReduceSum", "Shape", "Sub"} & {node.op_type for node in graph.node}
    onnx.checker.check_model(model)


def test_layers_that_share_a_cache_write_it_once_by_name() -> None:
    graph = with_paged_attention(_model(is_shared=True), *INPUTS, CUDA).graph
    owner, reader = (node for node in graph.node if node.op_type == "PagedAttention")
    assert list(owner.input[3:5]) == list(reader.input[3:5]) == ["past_k", "past_v"]
    assert (len(owner.output), len(reader.output)) == (3, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"more": ", , sink"}, "has a bias"),
        ({"smooth_softmax": 1}, "smooth_softmax 1, which PagedAttention lacks"),
        ({"k_quant_type": "PER_CHANNEL"}, "a scale for each channel"),
    ],
)
def test_attention_that_paged_attention_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NotFittingError, match=words):
        with_paged_attention(_model(**changes), *INPUTS, CUDA)


def test_soft_cap_is_refused_where_the_device_lacks_it() -> None:
    with pytest.raises(NotFittingError, match="soft cap"):
        with_paged_attention(_model(softcap=5.0), *INPUTS, KERNELS["webgpu"])


def test_mask_that_something_else_reads_is_refused_with_the_reader() -> None:
    model = _model()
    model.graph.node.append(helper.make_node("Cast", ["mask"], ["seen"], name="reader", to=FLOAT))
    model.graph.output.append(helper.make_tensor_value_info("seen", FLOAT, ["B", "T"]))
    with pytest.raises(NotFittingError, match="'mask' is read by Cast 'reader' besides the attention"):
        with_paged_attention(model, *INPUTS, CUDA)


def test_packed_inputs_are_one_row_inside() -> None:
    model = model_from("g (int64[B, S] ids) => (int64[B, S] out) { out = Identity (ids) }")
    pack_inputs(model.graph, ["ids"])
    (found,) = ReferenceEvaluator(model).run(None, {"ids": np.array([5, 6])})
    assert found.tolist() == [[5, 6]]
