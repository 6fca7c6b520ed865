"""Windowed KV caches get their full length; the window that attention looks at, and all else, stays."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from olive_ext.graph.attention_rewrites import with_full_length_kv


def _graph(*, windowed: tuple[bool, ...], length: int | str = "past_sliding_length") -> onnx.ModelProto:
    """A GroupQueryAttention for each of `windowed`. Never run, so nothing else is needed."""
    inputs, outputs, nodes = [], [], []
    value = helper.make_tensor_value_info
    for layer, is_windowed in enumerate(windowed):
        pasts, presents = ([f"{stem}.{layer}.{part}" for part in ("key", "value")] for stem in ("past", "present"))
        past_length, total = (length, "total_sliding_length") if is_windowed else ("past_sequence_length", "T")
        inputs += [value(name, TensorProto.FLOAT, ["B", 2, past_length, 16]) for name in pasts]
        outputs += [value(name, TensorProto.FLOAT, ["B", 2, total, 16]) for name in presents]
        attributes = {"sliding_window_cache": 1} if is_windowed else {}
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                ["q", "k", "v", *pasts, "seqlens", "total"],
                [f"y{layer}", *presents],
                domain="com.microsoft",
                num_heads=4,
                local_window_size=16 if is_windowed else -1,
                **attributes,
            )
        )
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs))


def _lengths(values: object) -> list[str | int]:
    dims = [value.type.tensor_type.shape.dim[2] for value in values]  # type: ignore[attr-defined]
    return [dim.dim_value or dim.dim_param for dim in dims]


@pytest.mark.parametrize("length", ["past_sliding_length", 32])
def test_windowed_layers_keep_all_positions_and_look_at_the_same_window(length: int | str) -> None:
    model = _graph(windowed=(True, False), length=length)
    before = model.SerializeToString()
    edited = with_full_length_kv(model)
    assert _lengths(edited.graph.input) == ["past_sequence_length"] * 4
    assert _lengths(edited.graph.output) == ["total_sequence_length"] * 2 + ["T"] * 2
    attributes = [{entry.name: entry.i for entry in node.attribute} for node in edited.graph.node]
    assert [found["local_window_size"] for found in attributes] == [16, -1]
    assert not any("sliding_window_cache" in found for found in attributes)
    assert model.SerializeToString() == before


def test_graph_without_windowed_caches_is_handed_back_as_it_is() -> None:
    model = _graph(windowed=(False, False))
    assert with_full_length_kv(model) is model
