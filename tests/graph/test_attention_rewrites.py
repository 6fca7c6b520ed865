"""What is cut out of a decoder and put into an encoder before ONNX Runtime sees them; windowed KV caches get their full
length, and the window that attention looks at, and all else, stays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from olive_ext.graph.edits import cross_graph, with_attention_bias, with_full_length_kv, with_total_of_all_rows
from tests.graph.text import model_from, session_of


def _weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {
        name: np.random.default_rng(len(name)).normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }


GRAPH = """
decoder (int64[B, S] input_ids, float[B, T, 4] encoder_hidden_states)
=> (float[B, S, 9] logits, float[B, T, 4] "present.0.encoder.key") {{
    {nodes}
}}
"""
NODES = "hidden = Gather (embed, input_ids) logits = MatMul (hidden, head) {key} = MatMul (encoder_hidden_states, key)"
BRANCHES = """
    logits, "present.0.encoder.key" = If (use_cache_branch) <
        then_branch = past () => (float past_logits, float past_key) {{
            past_logits = Constant <value_float = 0.0> () past_key = Constant <value_float = 0.0> ()
        }},
        else_branch = no_past () => (float logits, float inner_key) {{ {nodes} }}
    >
"""


def _decoder(nodes: str = NODES.format(key='"present.0.encoder.key"')) -> onnx.ModelProto:
    """Returns logits of the tokens, and a cross key of the encoder's states alone."""
    return model_from(GRAPH.format(nodes=nodes), 18, **_weights(embed=(9, 4), head=(4, 9), key=(4, 4)))


def _merged() -> onnx.ModelProto:
    """The same as the branch without a past of one If; the weight of its keys lies in the branch."""
    model = _decoder(BRANCHES.format(nodes=NODES.format(key="inner_key")))
    model.graph.node[0].attribute[1].g.initializer.append(model.graph.initializer.pop())
    model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    return model


@pytest.mark.parametrize("make", [_decoder, _merged])
def test_cross_graph_holds_only_what_its_outputs_need(make) -> None:
    model = make()
    before = model.SerializeToString()
    cut = cross_graph(model, {"present.0.encoder.key": None})
    assert model.SerializeToString() == before
    assert [value.name for value in cut.graph.input] == ["encoder_hidden_states"]
    assert [value.name for value in cut.graph.output] == ["present.0.encoder.key"]
    assert [tensor.name for tensor in cut.graph.initializer] == ["key"]
    states = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    (found,) = _run(cut, {"encoder_hidden_states": states})
    _, expected = _run(_decoder(), {"input_ids": np.ones((1, 1), np.int64), "encoder_hidden_states": states})
    np.testing.assert_array_equal(found, expected)


def _run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return session_of(model).run(None, feed)


def _attention(bias: bool) -> onnx.ModelProto:
    node = f"y = com.microsoft.Attention <num_heads = 2> (x, qkv{', bias' if bias else ''})"
    zeros = {"bias": np.zeros(24, np.float32)} if bias else {}
    graph = f"encoder (float[1, 4, 8] x) => (float[1, 4, 8] y) {{ {node} }}"
    return model_from(graph, 18, **_weights(qkv=(8, 24)), **zeros)


def test_attention_without_a_bias_gets_one_of_zeros_and_one_with_a_bias_is_left_alone() -> None:
    feed = {"x": np.random.default_rng(0).normal(size=(1, 4, 8)).astype(np.float32)}
    (found,) = _run(with_attention_bias(_attention(bias=False)), feed)
    model = _attention(bias=True)
    np.testing.assert_array_equal(found, _run(model, feed)[0])
    before = model.SerializeToString()
    assert with_attention_bias(model).SerializeToString() == before


ATTENTION = """
    y{layer}, "present.{layer}.key", "present.{layer}.value" = com.microsoft.GroupQueryAttention
        <num_heads = 4, {how}>
        (q, k, v, "past.{layer}.key", "past.{layer}.value", seqlens, total)
"""
HOW = {True: "local_window_size = 16, sliding_window_cache = 1", False: "local_window_size = -1"}


def _graph(*, windowed: tuple[bool, ...], length: int | str = "past_sliding_length") -> onnx.ModelProto:
    """A GroupQueryAttention for each of `windowed`. Never run, so nothing else is needed."""
    inputs, outputs = [], []
    for layer, is_windowed in enumerate(windowed):
        sizes = (length, "total_sliding_length") if is_windowed else ("past_sequence_length", "T")
        for values, name, size in zip((inputs, outputs), ("past", "present"), sizes, strict=True):
            values += [f'float[B, 2, {size}, 16] "{name}.{layer}.{part}"' for part in ("key", "value")]
    nodes = [ATTENTION.format(layer=layer, how=HOW[is_windowed]) for layer, is_windowed in enumerate(windowed)]
    return model_from(f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(nodes)} }}")


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
    assert with_full_length_kv(edited) is edited


def test_total_length_is_that_of_all_rows_and_not_of_the_first() -> None:
    """In the form of mobius 0.1.0: the first row's sum of the mask."""
    nodes = """
        sums = ReduceSum <keepdims = 0> (mask, axis) cast = Cast <to = 6> (sums) total = Gather (cast, place)
    """
    decoder = model_from(f"g (int64[B, T] mask) => (int32 total) {{ {nodes} }}", 18, axis=[1], place=0)
    attention = _graph(windowed=(False,)).graph
    decoder.graph.node.extend(attention.node)
    decoder.graph.input.extend(attention.input)
    decoder.graph.output.extend(attention.output)
    found = []
    for edit in (lambda model: model, with_total_of_all_rows):
        found += _run(cross_graph(edit(decoder), ["total"]), {"mask": np.array([[1, 1, 0], [1, 1, 1]])})
    assert [int(one) for one in found] == [2, 3]
    assert found[0].shape == found[1].shape == ()
