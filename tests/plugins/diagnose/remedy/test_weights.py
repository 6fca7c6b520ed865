"""A stored weight is read as ONNX Runtime computes with it: held against the formulas of its documentation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from olive_ext.errors import ModelError
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights
from tests.graph import quantized as graphs
from tests.model.test_constants import assert_damage_is_found
from tests.refusals import refused

NAME = "/layers.0/mlp/down_proj/MatMul"

FORMS = {
    **{
        f"nbits-{bits}-{block}-{'zp' if zp else 'sym'}": graphs.nbits(bits, block, has_zero_points=zp)
        for bits in (4, 8)
        for block in (16, 32, 64)
        for zp in (False, True)
    },
    "nbits-2": graphs.nbits(2, 32, has_zero_points=True),
    "nbits-rounded-activations": graphs.nbits(4, 32, has_zero_points=True, level=4),
    "nbits-fp16": graphs.nbits(4, 32, has_zero_points=True, dtype=np.float16),
    "qdq-channels": graphs.qdq(None),
    "qdq-blocks": graphs.qdq(16),
    "qdq-int4": graphs.qdq(16, int4=True),
    "table-4": graphs.table(4, 16),
    "table-8": graphs.table(8, 16),
}


@pytest.mark.parametrize("stored", [pytest.param(stored, id=name) for name, stored in FORMS.items()])
def test_stored_weight_is_read_to_the_bit(stored: graphs.Stored, tmp_path: Path) -> None:
    weights = GraphWeights(stored.model, tmp_path)
    matrix = weights.matrix(weights.uses[NAME])
    assert matrix.dtype == stored.matrix.dtype
    np.testing.assert_array_equal(matrix, stored.matrix)


def test_weight_of_a_gemm_stays_as_the_node_reads_it(tmp_path: Path) -> None:
    stored = graphs.qdq(None, transposed=True)
    weights = GraphWeights(stored.model, tmp_path)
    np.testing.assert_array_equal(weights.matrix(weights.uses[NAME]), stored.matrix.T)


def test_bytes_are_those_of_numbers_scales_and_zero_points(tmp_path: Path) -> None:
    stored = graphs.nbits(4, 32, has_zero_points=True)
    weights = GraphWeights(stored.model, tmp_path)
    product, blocks = graphs.NUM_INPUTS * graphs.NUM_OUTPUTS, graphs.NUM_OUTPUTS * graphs.NUM_INPUTS // 32
    assert weights.num_bytes(weights.uses[NAME]) == product // 2 + 4 * blocks + blocks // 2


def test_two_nodes_of_one_name_are_refused(tmp_path: Path) -> None:
    model = graphs.plain(graphs.random_weight())
    node = model.graph.node.add()
    node.CopyFrom(model.graph.node[0])
    node.output[0] = "z"
    with refused(ModelError, "unsupported", holds="/layers.0/mlp/down_proj/MatMul"):
        GraphWeights(model, tmp_path)


@pytest.mark.parametrize(("bits", "block", "has_zeros"), [(4, 32, False), (8, 32, False), (4, 16, True), (8, 16, True)])
def test_experts_weights_are_those_that_qmoe_computes_with(
    bits: int, block: int, has_zeros: bool, tmp_path: Path
) -> None:
    quantized, float_model = graphs.experts(bits, block, has_zero_points=has_zeros)
    weights = GraphWeights(quantized, tmp_path)
    read = {part: weights.matrix(weights.uses[f"/layers.0/moe/MoE/{part}"]) for part in ("fc1", "fc2")}
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(9, 64)).astype(np.float32), "route": rng.normal(size=(9, 2)).astype(np.float32)}
    own, other = (
        ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0] for model in (quantized, float_model(read))
    )
    # With 8 bits ONNX Runtime's kernel rounds activations to 8 bits, too.
    assert np.linalg.norm(own - other) < (2e-5 if bits == 4 else 0.03) * np.linalg.norm(other)
    assert sorted(GraphWeights(float_model(read), tmp_path).uses) == sorted(weights.uses)


def test_counters_in_names_are_left_out(tmp_path: Path) -> None:
    uses = [
        GraphWeights(graphs.plain(graphs.random_weight(), f"model/layers.0/q_proj/MatMul_node_{n}"), tmp_path).uses
        for n in (13, 15)
    ]
    assert list(uses[0]) == list(uses[1]) == ["model/layers.0/q_proj/MatMul"]


@pytest.mark.parametrize("bits", [4, 8])
def test_damage_of_experts_weights_is_found(bits: int) -> None:
    experts, float_model = graphs.experts(bits, 32, has_zero_points=bits == 4)
    weights = GraphWeights(experts, Path())
    floats = {use.part: weights.matrix(use) for use in weights.uses.values()}
    assert_damage_is_found(experts, float_model(floats), "fc1_s", (0, 0))
