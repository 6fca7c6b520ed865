"""Weights are paired by names, shapes and values; what has no counterpart is named. A stored weight is read as ONNX
Runtime computes with it: held against the formulas of its documentation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from olive_ext.errors import ModelError
from olive_ext.plugins.diagnose.remedy.pairing import Pairing, pair, refuse_nothing
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights
from tests.graph import quantized as graphs
from tests.model.test_constants import assert_damage_is_found
from tests.refusals import refused

STORED = graphs.nbits(4, 32, has_zero_points=True)
ORIGIN = STORED.matrix + np.random.default_rng(1).normal(0, 0.01, STORED.matrix.shape).astype(np.float32)


def paired(floats: onnx.ModelProto, quantized: onnx.ModelProto, folder: Path) -> Pairing:
    weights = GraphWeights(quantized, folder)
    pairing = pair(GraphWeights(floats, folder), weights)
    if not pairing.targets:
        refuse_nothing(pairing, len(weights.uses))
    return pairing


def products(*parts: tuple[str, np.ndarray], transposed: bool = False) -> onnx.ModelProto:
    """Products of one layer, by their names there."""
    model = graphs.plain(graphs.random_weight())
    del model.graph.node[:], model.graph.initializer[:]
    for name, matrix in parts:
        stored, kind = (matrix.T.copy(), "Gemm") if transposed else (matrix, "MatMul")
        attributes = {"transB": 1} if transposed else {}
        model.graph.initializer.append(numpy_helper.from_array(stored, f"{name}.weight"))
        node = helper.make_node(kind, ["x", f"{name}.weight"], [name], f"/layers.0/attn/{name}/MatMul", **attributes)
        model.graph.node.append(node)
    return model


def thirds(matrix: np.ndarray, names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")) -> list[tuple[str, np.ndarray]]:
    return list(zip(names, np.split(matrix, [24, 36], axis=1), strict=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_are_paired_with_the_product_that_has_them_beside_each_other(transposed: bool, tmp_path: Path) -> None:
    rounded, name = np.round(ORIGIN, 1), "/layers.0/attn/qkv_proj/MatMul"
    for floats, quantized in (
        (products(*thirds(ORIGIN), transposed=transposed), products(("qkv_proj", rounded))),
        (products(("qkv_proj", ORIGIN)), products(*thirds(rounded), transposed=transposed)),
    ):
        pairing = paired(floats, quantized, tmp_path)
        (target,) = pairing.targets
        assert (target.name, target.kind, target.is_joined) == (name, "attn/qkv_proj", True)
        assert target.float_bytes == ORIGIN.nbytes == target.bytes
        assert not pairing.unpaired
        both = GraphWeights(floats, tmp_path), GraphWeights(quantized, tmp_path)
        own = [matrix.T if own.is_transposed else matrix
               for own, matrix in zip(target.floats, target.numbers(*both).values(), strict=True)]  # fmt: skip
        np.testing.assert_array_equal(np.concatenate(own, axis=1), rounded)
        shapes = [both[0].matrix(use).shape for use in target.floats]
        assert [matrix.shape for matrix in target.numbers(*both).values()] == shapes


def several(*scales: float, name: str = "mlp/up_proj") -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """One product a layer, float and rounded, the rounded ones times `scales`; and a norm of each."""
    rng, models = np.random.default_rng(0), (graphs.plain(ORIGIN), graphs.plain(ORIGIN))
    for model in models:
        del model.graph.node[:], model.graph.initializer[:]
    for layer, scale in enumerate(scales):
        matrix, kind = rng.normal(size=(64, 48)).astype(np.float32), f"/layers.{layer}/{name}/MatMul"
        for model, numbers in zip(models, (matrix, np.round(matrix, 1) * np.float32(scale)), strict=True):
            model.graph.initializer.append(numpy_helper.from_array(numbers, f"weight{layer}{id(model)}"))
            node = helper.make_node("MatMul", ["x", model.graph.initializer[-1].name], [f"y{layer}"], kind)
            model.graph.node.append(node)
            norm = numpy_helper.from_array(
                np.linspace(1 + layer / 8, 2, 48, dtype=np.float32), f"layers.{layer}.norm.weight"
            )
            model.graph.initializer.append(norm)
            model.graph.node.append(helper.make_node("Mul", [f"y{layer}", norm.name], [f"z{layer}"]))
    return models


def with_product(model: onnx.ModelProto, weight: str, name: str) -> onnx.ModelProto:
    """One product more, of a weight that others have, too."""
    model.graph.node.append(helper.make_node("MatMul", ["x", weight], ["z"], name))
    return model


OTHER = (graphs.random_weight(9) * (np.std(ORIGIN) / 0.1)).astype(np.float32)
ROUNDED = np.round(ORIGIN, 1)
STRANGERS: dict[str, tuple[onnx.ModelProto, onnx.ModelProto, tuple[str, ...]]] = {
    # Bound numbers reach both products of the float graph: the loss of both would be called that of one.
    "one of two products is quantized": (
        with_product(graphs.plain(ORIGIN), "w", "/layers.1/mlp/down_proj/MatMul"), STORED.model, ("/layers", "1/")),
    "parts are interleaved": (
        products(("gate_up_proj", ORIGIN)), products(("gate_proj", ROUNDED[:, ::2]), ("up_proj", ROUNDED[:, 1::2])),
        ("/layers", "0/attn/gate_proj/MatMul")),
    "parts have no whole": (products(("qkv_proj", ORIGIN)), products(*thirds(ROUNDED)[:2]), ("2", "q_proj")),
    "a third product shares a part": (
        with_product(products(*thirds(ORIGIN)), "k_proj.weight", "/layers.1/attn/k_proj/MatMul"),
        products(("qkv_proj", ROUNDED)), ("/layers", "1/attn/k_proj/MatMul")),
    "another name": (graphs.plain(ORIGIN, "/layers.0/mlp/up_proj/MatMul"), STORED.model, ("down_proj/MatMul_Q4",)),
    "another shape": (graphs.plain(ORIGIN[:-1]), STORED.model, ("64", "48", "63")),
    "the values of another model": (graphs.plain(OTHER), STORED.model, ("relative error 1.4",)),
    "the values of another checkpoint": (*several(3, 3, 3, 3), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", STRANGERS)
def test_model_without_a_counterpart_is_refused_with_a_node(case: str, tmp_path: Path) -> None:
    floats, quantized, holds = STRANGERS[case]
    with refused(ModelError, "not_comparable", holds=holds):
        paired(floats, quantized, tmp_path)


@pytest.mark.parametrize("scale", [3.0, 10.0, -1.0, float("nan")])
def test_weight_that_is_far_off_among_others_that_are_not_is_a_target(scale: float, tmp_path: Path) -> None:
    pairing = paired(*several(1, scale, 1, 1), tmp_path)
    assert len(pairing.targets) == 4
    assert not pairing.unpaired
    ((name, what),) = [item for item in pairing.damaged.items() if "Mul" in item[0]]
    assert name == "/layers.1/mlp/up_proj/MatMul"
    assert what.startswith("is NaN" if np.isnan(scale) else "is not the float")


def test_weights_of_another_checkpoint_are_named_beside_the_one_that_is_not(tmp_path: Path) -> None:
    most = paired(*several(3, 3, 1, 3), tmp_path)
    assert len(most.targets) == 1
    assert len(most.unpaired) == 3


def test_all_names_of_an_encoder_end_in_its_part(tmp_path: Path) -> None:
    floats, quantized = several(1, 1, 1)
    norm = next(one for one in quantized.graph.initializer if one.name == "layers.1.norm.weight")
    norm.CopyFrom(numpy_helper.from_array(1.05 * numpy_helper.to_array(norm), "other"))
    for node in quantized.graph.node:
        node.input[:] = ["other" if name == "layers.1.norm.weight" else name for name in node.input]
    del quantized.graph.node[-2]
    pairing = pair(GraphWeights(floats, tmp_path), GraphWeights(quantized, tmp_path), "vision")
    assert sorted(pairing.unpaired) == ["/layers.2/mlp/up_proj/MatMul, vision", "layers.1.norm.weight, vision"]
    names = [*pairing.damaged, *(target.name for target in pairing.targets)]
    assert {name.partition(", ")[2] for name in names} == {"vision"}


def test_norm_that_is_scaled_is_a_target_with_the_float_graph_s_numbers(tmp_path: Path) -> None:
    floats, quantized = several(1, 1, 1)
    norm = next(one for one in quantized.graph.initializer if one.name == "layers.1.norm.weight")
    norm.CopyFrom(numpy_helper.from_array(1.05 * numpy_helper.to_array(norm), norm.name))
    own, other = GraphWeights(floats, tmp_path), GraphWeights(quantized, tmp_path)
    first = pair(own, other).targets[0]
    assert (first.name, first.layer, first.kind, first.is_constant) == (norm.name, 1, "norm/weight", True)
    assert first.numbers(own, other)[norm.name].max() == pytest.approx(2.1)
    for node in quantized.graph.node:
        node.input[:] = ["layers.1.other.weight" if name == norm.name else name for name in node.input]
    norm.name = "layers.1.other.weight"
    assert "layers.1.norm.weight" in pair(own, GraphWeights(quantized, tmp_path)).damaged, "it is missing"


def test_model_without_quantized_weights_has_nothing_to_locate(tmp_path: Path) -> None:
    with refused(ModelError, "unsupported"):
        paired(graphs.plain(ORIGIN), graphs.plain(ORIGIN), tmp_path)


def test_weight_in_a_form_that_is_not_compared_is_named(tmp_path: Path) -> None:
    """ONNX Runtime's dynamic quantization: the integers are no operand of a product that is known."""
    floats, both = graphs.plain(ORIGIN), graphs.nbits(4, 32, has_zero_points=True).model
    name = "/layers.1/mlp/down_proj/MatMul"
    floats.graph.node.append(helper.make_node("MatMul", ["x", "other"], ["z"], name))
    floats.graph.initializer.append(numpy_helper.from_array(ORIGIN, "other"))
    both.graph.node.append(helper.make_node("MatMulInteger", ["a", "integers"], ["z"], f"{name}_quant"))
    both.graph.initializer.append(numpy_helper.from_array(ORIGIN.astype(np.int8), "integers"))
    pairing = paired(floats, both, tmp_path)
    assert [target.layer for target in pairing.targets] == [0]
    assert "MatMulInteger, " in pairing.unpaired[name]
    del both.graph.node[0]
    with refused(ModelError, "not_comparable", holds="2"):
        paired(floats, both, tmp_path)


NAME, GEMM = "/layers.0/mlp/down_proj/MatMul", graphs.qdq(None, transposed=True)
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
    "qdq-gemm": graphs.Stored(GEMM.model, GEMM.matrix.T),
    "qdq-blocks": graphs.qdq(16),
    "qdq-int4": graphs.qdq(16, int4=True),
    "table-4": graphs.table(4, 16),
    "table-8": graphs.table(8, 16),
}


@pytest.mark.parametrize("stored", [pytest.param(stored, id=name) for name, stored in FORMS.items()])
def test_stored_weight_is_read_to_the_bit(stored: graphs.Stored, tmp_path: Path) -> None:
    """That of a Gemm stays as the node reads it."""
    weights = GraphWeights(stored.model, tmp_path)
    matrix = weights.matrix(weights.uses[NAME])
    assert matrix.dtype == stored.matrix.dtype
    np.testing.assert_array_equal(matrix, stored.matrix)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_numbers_have_the_scale_and_zero_point_of_the_block_that_the_node_names(
    has_zeros: bool, tmp_path: Path
) -> None:
    stored = graphs.nbits(4, 32, has_zero_points=has_zeros)
    (node,) = (node for node in stored.model.graph.node if node.op_type == "MatMulNBits")
    natural = np.arange(graphs.NUM_INPUTS) // 32
    order = np.random.default_rng(0).permutation(natural).astype(np.int32)
    stored.model.graph.initializer.append(numpy_helper.from_array(order, "groups"))
    node.input.extend([""] * (4 - len(node.input)) + ["groups"])
    weights = GraphWeights(stored.model, tmp_path)
    is_same = (weights.matrix(weights.uses[NAME]) == stored.matrix).mean(axis=1) == 1
    assert is_same.tolist() == (order == natural).tolist()


def test_two_nodes_of_one_name_are_refused(tmp_path: Path) -> None:
    model = graphs.plain(graphs.random_weight())
    node = model.graph.node.add()
    node.CopyFrom(model.graph.node[0])
    node.output[0] = "z"
    with refused(ModelError, "unsupported", holds="/layers.0/mlp/down_proj/MatMul"):
        GraphWeights(model, tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_damage_of_experts_weights_is_found(bits: int) -> None:
    experts, float_model = graphs.experts(bits, 32, has_zero_points=bits == 4)
    weights = GraphWeights(experts, Path())
    floats = {use.part: weights.matrix(use) for use in weights.uses.values()}
    assert_damage_is_found(experts, float_model(floats), "fc1_s", (0, 0))
