"""Rotary tables that are refused beforehand are those that ONNX Runtime's kernels refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from olive_ext.errors import ModelError
from olive_ext.model.spec.attention import refuse_rotary, rotary_rows
from tests.graph.text import model_from, session_of

STEP = 5
CAUGHT = (onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,)
ATTENTION = """
rotary (float[1, S, {width}] query, float[1, S, {size}] key, float[1, S, {size}] value,
    float[1, 1, P, {size}] past_key, float[1, 1, P, {size}] past_value, int32[1] lengths, int32 total)
=> (float out, float present_key, float present_value) {{
    out, present_key, present_value = com.microsoft.GroupQueryAttention
        <num_heads = 2, kv_num_heads = 1, do_rotary = 1>
        (query, key, value, past_key, past_value, lengths, total, cos_cache, sin_cache)
}}
"""


def tables(cosines: tuple[int, ...], sines: tuple[int, ...]) -> dict[str, Any]:
    return {"cos_cache": np.ones(cosines, np.float32), "sin_cache": np.zeros(sines, np.float32)}


def attention(head_size: int, cosines: tuple[int, ...], sines: tuple[int, ...]) -> onnx.ModelProto:
    return model_from(ATTENTION.format(size=head_size, width=2 * head_size), 23, **tables(cosines, sines))


def is_run(model: onnx.ModelProto, feed: dict[str, Any]) -> bool:
    session = session_of(model)
    try:
        session.run(None, feed)
    except CAUGHT:
        return False
    return True


def is_taken(model: onnx.ModelProto, head_size: int) -> bool:
    try:
        refuse_rotary(model.graph, {"past_key": head_size})
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("head_size", [8, 12, 16, 24, 32, 48])
@pytest.mark.parametrize("width", [1, 2, 4, 6, 7, 8, 9, 12, 16, 24])
def test_tables_of_an_attention_are_refused_where_the_kernel_refuses_them(head_size: int, width: int) -> None:
    model = attention(head_size, (32, width), (32, width))
    new, past = np.zeros((1, STEP, head_size), np.float32), np.zeros((1, 1, 0, head_size), np.float32)
    feed = {"query": np.tile(new, 2), "key": new, "value": new, "past_key": past, "past_value": past}
    feed |= {"lengths": np.array([STEP - 1], np.int32), "total": np.array(STEP, np.int32)}
    assert is_taken(model, head_size) == is_run(model, feed)


@pytest.mark.parametrize("domain", ["", "com.microsoft."])
@pytest.mark.parametrize("rotated", [0, 8, 16])
@pytest.mark.parametrize(
    ("cosines", "sines"), [((32, 8), (32, 8)), ((32, 4), (32, 4)), ((32, 8), (16, 8)), ((32, 8), (32, 4))]
)
def test_tables_of_an_embedding_are_refused_where_the_kernel_refuses_them(
    domain: str, rotated: int, cosines: tuple[int, ...], sines: tuple[int, ...]
) -> None:
    names = "x, positions, cos_cache, sin_cache" if domain else "x, cos_cache, sin_cache, positions"
    how = f"<rotary_embedding_dim = {rotated}, num_heads = 2>" if rotated else ""
    node = f"out = {domain}RotaryEmbedding {how} ({names})"
    graph = f"rotary (float[1, 2, S, 16] x, int64[1, S] positions) => (float out) {{ {node} }}"
    model = model_from(graph, 23, **tables(cosines, sines))
    feed = {"x": np.zeros((1, 2, STEP, 16), np.float32), "positions": np.arange(STEP)[None]}
    is_open = cosines == sines and not (rotated and domain == "")  # it may be half of a head
    assert is_taken(model, 16) == (is_open or is_run(model, feed))


def test_context_is_that_of_the_smallest_table_that_a_node_reads() -> None:
    model = attention(16, (32, 8), (32, 8))
    other = tables((64, 8), (64, 8)).items()
    model.graph.initializer.extend(numpy_helper.from_array(array, f"other.{name}") for name, array in other)
    assert rotary_rows(model.graph) == 32
    del model.graph.node[:]
    assert rotary_rows(model.graph) == 64
