"""Activations that a quantized model rounds are targets: what is switched on is what pairs round. What
rounding of weights does is told from another checkpoint's weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import olive_ext
from olive_ext.model.files.constants import Array, distances
from olive_ext.plugins.diagnose.remedy.pages import doubt
from olive_ext.plugins.diagnose.remedy.pairing import pair
from olive_ext.plugins.diagnose.remedy.variants import Rounding, put_switches, static_roundings
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights
from tests.exports import quickstart
from tests.graph import quantized as graphs
from tests.plugins.diagnose.remedy.test_locate import WORK

ROWS = np.random.default_rng(0).normal(size=(2, 5, graphs.NUM_INPUTS)).astype(np.float32)


def pairs(floats: onnx.ModelProto, quantized: onnx.ModelProto, folder: Path) -> tuple[list[Rounding], dict[str, str]]:
    both = GraphWeights(floats, folder), GraphWeights(quantized, folder)
    pairing = pair(*both)
    return list(static_roundings(pairing, *both)), pairing.unpaired


def switched(floats: onnx.ModelProto, roundings: list[Rounding], rows: np.ndarray, *, is_on: bool) -> np.ndarray:
    """What the float graph gives with all of its switches on, or off."""
    edited = onnx.ModelProto()
    edited.CopyFrom(floats)
    assert not put_switches(edited, roundings)
    for tensor in edited.graph.initializer:
        if tensor.data_type == TensorProto.BOOL:
            tensor.CopyFrom(numpy_helper.from_array(np.array(is_on), tensor.name))
    return ort.InferenceSession(edited.SerializeToString()).run(None, {"x": rows})[0]


def with_pair(stored: graphs.Stored, scale: float = 0.05) -> onnx.ModelProto:
    """The graph whose input goes through QuantizeLinear and DequantizeLinear."""
    model = onnx.ModelProto()
    model.CopyFrom(stored.model)
    scale_and_zero = [numpy_helper.from_array(np.array(scale, np.float32), "x_scale")]
    scale_and_zero.append(numpy_helper.from_array(np.array(128, np.uint8), "x_zero_point"))
    model.graph.initializer.extend(scale_and_zero)
    constants = ["x_scale", "x_zero_point"]
    model.graph.node[-1].input[0] = "x_DequantizeLinear_Output"
    model.graph.node.insert(
        0, helper.make_node("DequantizeLinear", ["x_Q", *constants], ["x_DequantizeLinear_Output"], "x_DQ")
    )
    model.graph.node.insert(0, helper.make_node("QuantizeLinear", ["x", *constants], ["x_Q"], "x_Quantize"))
    return model


def test_switched_pair_is_that_of_the_quantized_graph(tmp_path: Path) -> None:
    stored = graphs.qdq(None)
    quantized, exact = with_pair(stored), graphs.plain(stored.matrix)
    (rounding,), unpaired = pairs(graphs.plain(stored.matrix + np.float32(1e-4)), quantized, tmp_path)
    assert not unpaired
    assert rounding.nodes == ("x_Quantize", "x_DQ")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    given = ort.InferenceSession(quantized.SerializeToString(), options).run(None, {"x": ROWS})[0]
    np.testing.assert_allclose(switched(exact, [rounding], ROWS, is_on=True), given, rtol=1e-4, atol=1e-5)
    off = switched(exact, [rounding], ROWS, is_on=False)
    assert np.linalg.norm(off - given) > 1e-3 * np.linalg.norm(given)


def test_pair_that_only_the_quantized_graph_s_nodes_read_is_named(tmp_path: Path) -> None:
    stored = graphs.qdq(None)
    quantized = with_pair(stored)
    quantized.graph.node.append(helper.make_node("Relu", ["x_DequantizeLinear_Output"], ["z"], "/layers.0/more/Relu"))
    roundings, unpaired = pairs(graphs.plain(stored.matrix + np.float32(1e-4)), quantized, tmp_path)
    assert not roundings
    assert unpaired == {"x_Quantize": "the float graph has no node '/layers.0/more/Relu' that reads it"}


def with_rounded_output(numbers: Array) -> onnx.ModelProto:
    """The graph of one product, whose output is the graph's and goes through a pair."""
    model, name = graphs.plain(numbers), "y_raw"
    model.graph.node[0].output[0] = name
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.25, np.float32), "y_scale"))
    for kind, given, made in (("QuantizeLinear", name, "y_Q"), ("DequantizeLinear", "y_Q", "y")):
        model.graph.node.append(helper.make_node(kind, [given, "y_scale"], [made], f"y_{kind}"))
    return model


def test_output_of_a_product_is_rounded_where_it_is_made(tmp_path: Path) -> None:
    """The engine moves what reads it, and the graph's output may be what is rounded."""
    stored = graphs.plain(graphs.random_weight())
    (rounding,), unpaired = pairs(stored, with_rounded_output(np.round(graphs.random_weight(), 2)), tmp_path)
    assert not unpaired
    assert rounding.name == "/layers.0/mlp/down_proj/MatMul, output, activations"
    off, on = (switched(stored, [rounding], ROWS, is_on=is_on) for is_on in (False, True))
    np.testing.assert_array_equal(on, np.clip(np.round(off / np.float32(0.25)), 0, 255) * np.float32(0.25))


def test_site_that_the_engine_has_renamed_is_found_by_its_weight(tmp_path: Path) -> None:
    matrix = graphs.random_weight()
    (rounding,), _ = pairs(graphs.plain(matrix), with_rounded_output(np.round(matrix, 2)), tmp_path)
    moved, other = graphs.plain(matrix, "a row later"), graphs.plain(matrix, "another")
    other.graph.initializer[0].name = other.graph.node[0].input[1] = "v"
    assert not put_switches(moved, [rounding])
    assert put_switches(other, [rounding]) == [rounding]


class Texts(CalibrationDataReader):  # type: ignore[misc]
    """A text of 64 tokens without a past."""

    def __init__(self, model: onnx.ModelProto) -> None:
        tokens = np.random.default_rng(0).integers(4, 250, (1, 64))
        feeds: dict[str, Any] = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        for value in model.graph.input:
            if value.name not in feeds:
                dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
                feeds[value.name] = np.zeros((1, dims[1], 0, dims[3]), np.float32)
        self._texts: Iterator[dict[str, Any]] = iter([feeds])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._texts, None)


def rounded_by_ort(folder: Path) -> Path:
    """The quickstart's model, weights and activations of its products in 8 bits, by ONNX Runtime's static quantizer."""
    source = quickstart.exported()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.onnx*", "cache"))
    texts = Texts(onnx.load(source / "model.onnx", load_external_data=False))
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    form = {"quant_format": QuantFormat.QDQ, "op_types_to_quantize": ["MatMul"], "per_channel": True}
    quantize_static(source / "model.onnx", folder / "model.onnx", texts, **types, **form)
    return folder


@pytest.mark.long
def test_static_pairs_are_measured_one_by_one(tmp_path: Path) -> None:
    found = olive_ext.locate(
        rounded_by_ort(tmp_path / "qdq"), reference=quickstart.exported(), **{**WORK, "limit": 4}, top=3
    )
    activations = [entry for entry in found.entries if entry.kind.endswith("activations")]
    weights = [entry for entry in found.entries if entry not in activations]
    assert len(weights) == 21
    assert len(activations) >= 21
    assert sum(entry.kl for entry in activations) > 10 * sum(entry.kl for entry in weights) > 0
    assert "/model/layers.3/mlp/down_proj/MatMul, output, activations" in [entry.name for entry in found.entries[:3]]
    assert found.total.mean == pytest.approx(found.model_kl.mean, rel=0.05)
    assert not found.unpaired


def share(floats: Array, others: Array, bits: int, *, is_symmetric: bool = True) -> float:
    rounded = graphs.to_nearest(graphs.plain(others), bits, is_symmetric=is_symmetric)
    (distance,) = distances(*(GraphWeights(one, Path()) for one in (graphs.plain(floats), rounded))).values()
    return distance.share


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_rounding_moves_no_number_by_more_than_a_step(bits: int, is_symmetric: bool) -> None:
    weight = graphs.random_weight(1)
    assert share(weight, weight, bits, is_symmetric=is_symmetric) == 0
    assert not doubt({}, {"w": 0.0})


@pytest.mark.parametrize(("bits", "noise"), [(4, 0.3), (8, 0.05)])
def test_another_checkpoint_is_told(bits: int, noise: float) -> None:
    weight = graphs.random_weight(1)
    found = share(weight, weight + noise * graphs.random_weight(2), bits)
    assert 0.05 < found < 1
    (told,) = doubt({}, {"w": found})
    assert told.startswith(f"{100 * found:.0f} % of the numbers, and {100 * found:.0f} % of those of 'w', lie farther")
