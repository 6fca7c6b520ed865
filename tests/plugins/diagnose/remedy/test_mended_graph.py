"""Graphs with other precisions for some weights: each form becomes each precision, and computes what it should."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from olive_ext.errors import ModelError
from olive_ext.model.files.constants import Array
from olive_ext.plugins.diagnose.remedy.mended_package import Mending
from olive_ext.plugins.diagnose.remedy.pairing import Pairing, Sources, pair, whole_experts
from olive_ext.plugins.diagnose.remedy.weights import FLOAT, GraphWeights, Precision
from tests.graph import quantized as graphs
from tests.refusals import refused

INT8 = Precision(8, 32)


def mended(
    floats: onnx.ModelProto, quantized: onnx.ModelProto, precision: Precision
) -> tuple[onnx.ModelProto, Pairing, Sources]:
    """The quantized graph with all its targets in `precision`, numbers inside."""
    own, other = GraphWeights(floats, Path()), GraphWeights(quantized, Path())
    pairing = pair(own, other)
    sources = Sources(own, other)
    edited = copy.deepcopy(quantized)
    mending = Mending(edited, sources, dict.fromkeys(whole_experts(pairing.targets), precision))
    for new in mending.tensors.values():
        numbers = np.concatenate([part.reshape(-1) for part in new.pieces()]).reshape(new.dims)
        assert numbers.nbytes == new.num_bytes
        edited.graph.initializer.append(numpy_helper.from_array(numbers, new.name))
    return edited, pairing, sources


def run(model: onnx.ModelProto, x: Array, **others: Array) -> Array:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": x, **others})[0])


def near(stored: graphs.Stored) -> Array:
    """A float weight that the stored one may be the rounding of."""
    return np.asarray(stored.matrix + graphs.random_weight() * 0.01, np.float32)


FORMS = {
    "int4": graphs.nbits(4, 32, has_zero_points=False),
    "int4_zero_points": graphs.nbits(4, 16, has_zero_points=True),
    "int4_level_4": graphs.nbits(4, 32, has_zero_points=False, level=4),
    "int8_qdq": graphs.qdq(None),
    "int8_qdq_blocks": graphs.qdq(32),
}


def test_bias_of_a_product_stays() -> None:
    stored = graphs.nbits(4, 32, has_zero_points=False)
    bias = np.linspace(-1, 1, graphs.NUM_OUTPUTS).astype(np.float32)
    stored.model.graph.node[0].input.extend(["", "", "b"])
    stored.model.graph.initializer.append(numpy_helper.from_array(bias, "b"))
    origin = (stored.matrix + graphs.random_weight() * 0.001).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(3, graphs.NUM_INPUTS)).astype(np.float32)
    for precision in (FLOAT, INT8):
        edited, _, _ = mended(graphs.plain(origin), stored.model, precision)
        np.testing.assert_allclose(run(edited, x), x @ origin + bias, atol=0.1)


@pytest.mark.parametrize("precision", [FLOAT, Precision(8, 16), Precision(4, 16)])
def test_tied_weight_is_stored_once(precision: Precision) -> None:
    """A table and a product of one weight, in the form of onnxruntime-genai's builder."""
    origin = graphs.random_weight(2)
    edited, pairing, _ = mended(tied(origin), tied(origin, 4), precision)
    assert len(pairing.targets) == 1
    large = [tensor for tensor in edited.graph.initializer if np.prod(tensor.dims) >= origin.size // 2]
    assert len(large) == 1
    x = np.array([5, 1])
    atol = {0: 0, 8: 0.05, 4: 0.2}[precision.bits]
    np.testing.assert_allclose(run(edited, x), run(tied(origin), x), atol=atol)


def test_weight_that_is_here_already_is_not_stored_again() -> None:
    """A quantized head whose float weight is the table, which was not quantized."""
    origin = graphs.random_weight(2)
    quantized = tied(origin, 4)
    table = tied(origin)
    lookup_nodes = [node for node in table.graph.node if node.op_type in ("Transpose", "Gather")]
    kept = [node for node in quantized.graph.node if node.op_type == "MatMulNBits"]
    del quantized.graph.node[:]
    quantized.graph.node.extend([*lookup_nodes, *kept])
    quantized.graph.initializer.append(table.graph.initializer[0])
    edited, _, _ = mended(table, quantized, FLOAT)
    assert {tensor.name for tensor in edited.graph.initializer} - {"shape"} == {"lm_head.weight"}
    x = np.array([5, 1])
    np.testing.assert_array_equal(run(edited, x), run(table, x))


def test_precision_that_a_graph_cannot_have_is_refused_by_name() -> None:
    stored = graphs.qdq(None, transposed=True)
    floats = graphs.qdq(None, transposed=True).model
    del floats.graph.node[:], floats.graph.initializer[:]
    floats.graph.node.append(helper.make_node("Gemm", ["x", "w"], ["y"], "/layers.0/mlp/down_proj/MatMul", transB=1))
    origin = (stored.matrix.T + 0.001).astype(np.float32)
    floats.graph.initializer.append(numpy_helper.from_array(origin, "w"))
    with refused(ModelError, "unsupported", holds=("/layers", "0/mlp/down_proj/MatMul", "int8", "32")):
        mended(floats, stored.model, INT8)
    edited, _, _ = mended(floats, stored.model, FLOAT)
    x = np.ones((1, graphs.NUM_INPUTS), np.float32)
    np.testing.assert_array_equal(run(edited, x), run(floats, x))


def tied(weight_HV: Array, bits: int = 0) -> onnx.ModelProto:
    """logits = table[x] @ table.T, float or quantized in blocks of 16."""
    name = "lm_head.weight"
    head, table = "/lm_head/MatMul", "/model/embed_tokens/Gather"
    if not bits:
        nodes = [
            helper.make_node("Transpose", [name], ["table"], "/transpose", perm=[1, 0]),
            helper.make_node("Gather", ["table", "x"], ["h"], table),
            helper.make_node("MatMul", ["h", name], ["y"], head),
        ]
        return model_of(nodes, {name: weight_HV}, None)
    width, vocabulary = weight_HV.shape
    blocks = weight_HV.T.reshape(vocabulary, width // 16, 16)
    scales = np.abs(blocks).max(2) / 7
    numbers = (np.round(blocks / scales[..., None]) + 8).astype(np.uint8)
    tensors = {
        f"{name}_Q4": graphs.packed(numbers, 4),
        f"{name}_scales": scales,
        "shape": np.array([vocabulary, width // 2]),
    }
    attributes = {"domain": "com.microsoft", "bits": 4, "block_size": 16}
    nodes = [
        helper.make_node("Reshape", [f"{name}_Q4", "shape"], ["flat"], "/reshape"),
        helper.make_node(
            "GatherBlockQuantized",
            ["flat", "x", f"{name}_scales"],
            ["h"],
            f"{table}_Q4",
            gather_axis=0,
            quantize_axis=1,
            **attributes,
        ),
        helper.make_node(
            "MatMulNBits",
            ["h", f"{name}_Q4", f"{name}_scales"],
            ["y"],
            f"{head}_Q4",
            K=width,
            N=vocabulary,
            **attributes,
        ),
    ]
    return model_of(nodes, tensors, None)


def model_of(nodes: list[onnx.NodeProto], tensors: dict[str, Array], shape: list[int | None] | None) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "tables",
        [helper.make_tensor_value_info("x", TensorProto.INT64, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


EXPERTS = [(4, 32, False), (4, 16, True), (8, 32, False)]


@pytest.mark.parametrize(("bits", "block", "has_zero_points"), EXPERTS)
@pytest.mark.parametrize("precision", [FLOAT, Precision(8, 16), Precision(4, 16)])
def test_experts_in_another_precision_are_near_the_float_ones(
    bits: int, block: int, has_zero_points: bool, precision: Precision
) -> None:
    quantized, float_model = graphs.experts(bits, block, has_zero_points=has_zero_points)
    bias = np.linspace(-1, 1, 2 * 64).reshape(2, 64).astype(np.float32)
    quantized.graph.node[0].input[4] = "bias"
    quantized.graph.initializer.append(numpy_helper.from_array(bias, "bias"))
    weights = GraphWeights(quantized, Path())
    drawn = np.random.default_rng(3)
    origins = {use.part: weights.matrix(use) for use in weights.uses.values()}
    origins = {part: (w + drawn.normal(0, 0.01, w.shape)).astype(np.float32) for part, w in origins.items()}
    floats = float_model({**origins, "bias": bias})
    floats.graph.node[0].input[3] = "bias"
    edited, _, _ = mended(floats, quantized, precision)
    feeds = {"x": drawn.normal(size=(5, 64)).astype(np.float32), "route": drawn.normal(size=(5, 2)).astype(np.float32)}
    is_read = [name for name in edited.graph.node[0].input if name]
    assert {tensor.name for tensor in edited.graph.initializer} == set(is_read) - {"x", "route"}
    if precision == FLOAT:
        np.testing.assert_array_equal(run(edited, **feeds), run(floats, **feeds))
        return
    made = GraphWeights(edited, Path())
    stored = {use.part: made.matrix(use) for use in made.uses.values()}
    for part, origin in origins.items():
        step = np.abs(origin).max() / (127 if precision.bits == 8 else 7)
        assert np.abs(stored[part] - origin).max() <= step
    plain = float_model({**stored, "bias": bias})
    plain.graph.node[0].input[3] = "bias"
    expected = run(plain, **feeds)  # in 8 bits the kernel rounds what it reads
    tolerance = np.abs(expected).max() * (0.03 if precision.bits == 8 else 1e-5)
    np.testing.assert_allclose(run(edited, **feeds), expected, atol=tolerance)


def test_experts_that_cannot_have_a_precision_are_refused_by_name() -> None:
    quantized, float_model = graphs.experts(4, 32)
    weights = GraphWeights(quantized, Path())
    floats = float_model({use.part: weights.matrix(use) + np.float32(0.001) for use in weights.uses.values()})
    sources = Sources(GraphWeights(floats, Path()), weights)
    targets = pair(sources.floats, weights).targets
    (target,) = whole_experts(targets)
    for graph_case, precision in ((targets[0], FLOAT), (target, Precision(8, 64))):
        with refused(ModelError, "unsupported", holds=(graph_case.name, precision.name)):
            Mending(copy.deepcopy(quantized), sources, {graph_case: precision})


def test_nodes_whose_first_output_is_left_out_stay() -> None:
    stored = FORMS["int4"]
    quantized = copy.deepcopy(stored.model)
    for name in ("one", "other"):
        quantized.graph.node.append(helper.make_node("LSTM", ["x", "w", "r"], ["", name], name, hidden_size=4))
    origin = near(stored)
    edited, _, _ = mended(graphs.plain(origin), quantized, FLOAT)
    assert [node.name for node in edited.graph.node if node.op_type == "LSTM"] == ["one", "other"]
