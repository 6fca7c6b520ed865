"""What is cut out of a decoder and put into an encoder before ONNX Runtime sees them; windowed KV caches get their full
length, and the window that attention looks at, and all else, stays."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from olive_ext.graph.edits import cross_graph, with_attention_bias, with_full_length_kv, with_total_of_all_rows

FLOAT = TensorProto.FLOAT


def _value(name: str, *shape: object, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    values = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    return onnx.numpy_helper.from_array(values, name)


def _decoder() -> onnx.ModelProto:
    """Returns logits of the tokens, and a cross key of the encoder's states alone."""
    nodes = [
        helper.make_node("Gather", ["embed", "input_ids"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "head"], ["logits"]),
        helper.make_node("MatMul", ["encoder_hidden_states", "key"], ["present.0.encoder.key"]),
    ]
    inputs = [_value("input_ids", "B", "S", kind=TensorProto.INT64), _value("encoder_hidden_states", "B", "T", 4)]
    outputs = [_value("logits", "B", "S", 9), _value("present.0.encoder.key", "B", "T", 4)]
    weights = [_weight("embed", 9, 4), _weight("head", 4, 9), _weight("key", 4, 4)]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _merged() -> onnx.ModelProto:
    """The same as the branch without a past of one If; the weight of its keys lies in the branch."""
    model = _decoder()
    graph = model.graph
    without = helper.make_graph(list(graph.node), "no_past", [], [_value("logits"), _value("inner_key")])
    without.node[-1].output[0] = "inner_key"
    without.initializer.append(graph.initializer.pop())
    with_past = helper.make_graph(
        [helper.make_node("Constant", [], [name], value_float=0.0) for name in ("past_logits", "past_key")],
        "past",
        [],
        [_value("past_logits"), _value("past_key")],
    )
    names = [output.name for output in graph.output]
    branch = helper.make_node("If", ["use_cache_branch"], names, then_branch=with_past, else_branch=without)
    del graph.node[:]
    graph.node.append(branch)
    graph.input.append(_value("use_cache_branch", 1, kind=TensorProto.BOOL))
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
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)


def _attention(bias: bool) -> onnx.ModelProto:
    inputs = ["x", "qkv", *(["bias"] if bias else [])]
    node = helper.make_node("Attention", inputs, ["y"], domain="com.microsoft", num_heads=2)
    weights = [_weight("qkv", 8, 24)]
    if bias:
        weights.append(onnx.numpy_helper.from_array(np.zeros(24, np.float32), "bias"))
    graph = helper.make_graph([node], "encoder", [_value("x", 1, 4, 8)], [_value("y", 1, 4, 8)], weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def test_attention_without_a_bias_gets_one_of_zeros_and_one_with_a_bias_is_left_alone() -> None:
    feed = {"x": np.random.default_rng(0).normal(size=(1, 4, 8)).astype(np.float32)}
    (found,) = _run(with_attention_bias(_attention(bias=False)), feed)
    model = _attention(bias=True)
    np.testing.assert_array_equal(found, _run(model, feed)[0])
    before = model.SerializeToString()
    assert with_attention_bias(model).SerializeToString() == before


def test_attention_without_a_bias_still_ends_the_process(tmp_path) -> None:
    """The reason for the edit: once ONNX Runtime survives this, the edit can go."""
    file = tmp_path / "model.onnx"
    onnx.save(_attention(bias=False), file)
    code = (
        "import sys, numpy as np, onnxruntime as ort\n"
        "session = ort.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "session.run(None, {'x': np.ones((1, 4, 8), np.float32)})\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, check=False).returncode != 0


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
    assert with_full_length_kv(edited) is edited


def test_total_length_is_that_of_all_rows_and_not_of_the_first() -> None:
    """In the form of mobius 0.1.0: the first row's sum of the mask."""
    model = _graph(windowed=(False,))
    mask = helper.make_tensor_value_info("mask", TensorProto.INT64, ["B", "T"])
    consts = [onnx.numpy_helper.from_array(np.array(value), name) for name, value in (("axis", [1]), ("place", 0))]
    nodes = [
        helper.make_node("ReduceSum", ["mask", "axis"], ["sums"], keepdims=0),
        helper.make_node("Cast", ["sums"], ["cast"], to=TensorProto.INT32),
        helper.make_node("Gather", ["cast", "place"], ["total"]),
        *model.graph.node,
    ]
    total = helper.make_tensor_value_info("total", TensorProto.INT32, [])
    graph = helper.make_graph(nodes, "g", [mask, *model.graph.input], [total, *model.graph.output], consts)
    decoder = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    found = []
    for edit in (lambda model: model, with_total_of_all_rows):
        found += _run(cross_graph(edit(decoder), ["total"]), {"mask": np.array([[1, 1, 0], [1, 1, 1]])})
    assert [int(one) for one in found] == [2, 3]
    assert found[0].shape == found[1].shape == ()
