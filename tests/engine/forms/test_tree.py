"""What steps cost follows what the engine does with a plan's parts.

A graph with inputs for tree batches attends as before where nothing is hidden, and as told where something is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from olive_ext.engine.forms.tree import (
    POSITIONS,
    BiasInput,
    choose_size,
    cost_of_rows,
    cost_of_trees,
    step_cost,
    with_tree_attention,
)
from olive_ext.engine.runners.runner import NotFittingError
from tests.graph.text import model_from, session_of


def test_a_text_costs_its_steps_and_short_ones_share_them() -> None:
    """A long one pays for its own past only, in tree batches as much as alone, and so it runs alone."""
    steps = [(256, 256), (256, 512), (100, 612)]
    assert cost_of_rows([(612, 0)], 256) == pytest.approx(sum(step_cost(*step) for step in steps))
    assert cost_of_rows([(612, 50)], 256) == pytest.approx(sum(step_cost(size, cells + 50) for size, cells in steps))
    assert cost_of_trees([(2048, 0)], 256) == pytest.approx(cost_of_rows([(2048, 0)], 256))
    assert choose_size([(10, 100)] * 400, 256)[0] in (128, 256, 512)
    assert choose_size([(2047, 0)] * 20, 256)[0] == 0


HEADS, KV_HEADS, SIZE, CONTEXT = 4, 2, 16, 32
FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32


GRAPH = """
attention (float[B, S, 128] qkv, float[B, 2, P, 16] pk, float[B, 2, P, 16] pv, int32[B] last, int32 total)
=> (float[B, S, 64] out, float k, float v) {{
    out, k, v = com.microsoft.{op}
        <num_heads = 4, kv_num_heads = 2, do_rotary = {do_rotary}, local_window_size: int = {window}>
        (qkv, , , pk, pv, last, total, cos, sin{more})
}}
"""


def _model(window: int = -1, op: str = "GroupQueryAttention", more: str = "", do_rotary: int = 1) -> onnx.ModelProto:
    """One GroupQueryAttention over packed queries, keys and values."""
    angles = np.arange(CONTEXT)[:, None] / 100 ** (np.arange(0, SIZE, 2) / SIZE)
    tables = {function.__name__: function(angles).astype(np.float32) for function in (np.cos, np.sin)}
    return model_from(GRAPH.format(op=op, do_rotary=do_rotary, window=window, more=more), **tables)


def _run(model: onnx.ModelProto, more: Mapping[str, Any], tokens: int, past: int) -> np.ndarray:
    """The attention's output for `tokens` behind `past`; what lies in the cache depends on the cell only."""
    rng = np.random.default_rng(5)
    cache = rng.standard_normal((2, 1, KV_HEADS, CONTEXT, SIZE)).astype(np.float32)
    rows = np.random.default_rng(7).standard_normal((1, CONTEXT, (HEADS + 2 * KV_HEADS) * SIZE)).astype(np.float32)
    feeds = {
        "qkv": rows[:, past : past + tokens],
        "pk": cache[0][:, :, :past],
        "pv": cache[1][:, :, :past],
        "last": np.array([past + tokens - 1], np.int32),
        "total": np.array(past + tokens, np.int32),
        **more,
    }
    return np.asarray(session_of(model).run(["out"], feeds)[0])


def _told(biases: Sequence[BiasInput], positions: np.ndarray, visible_ST: np.ndarray) -> dict[str, np.ndarray]:
    bias = np.where(visible_ST, 0, -1e30).astype(np.float32)[None, None]
    return {POSITIONS: positions[None], **{found.name: bias for found in biases}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"op": "MultiHeadAttention"}, "MultiHeadAttention"),
        ({"more": ", , bias"}, "has a bias already"),
        ({"do_rotary": 0}, "counts positions by itself"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotFittingError, match=reason):
        with_tree_attention(_model(**changes), ["pk", "pv"], has_positions=False)


def test_a_rotary_table_that_the_graph_computes_is_refused() -> None:
    model = _model()
    del model.graph.initializer[0]
    with pytest.raises(NotFittingError, match="'cos' is computed"):
        with_tree_attention(model, ["pk", "pv"], has_positions=False)
