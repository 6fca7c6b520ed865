"""Activations that a quantized model rounds and a KV cache that it quantizes are named, and are no entries. What
rounding of weights does is told from another checkpoint's weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import olive_ext
from olive_ext.errors import ModelError
from olive_ext.model.files.constants import Array, pairs_of
from olive_ext.model.files.grids import distance
from olive_ext.plugins.diagnose.remedy.pages import doubt
from olive_ext.plugins.diagnose.remedy.pairing import pair
from olive_ext.plugins.diagnose.remedy.variants import rounded_inside
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights
from tests.backends import local_tasks
from tests.exports import quickstart
from tests.exports.genai import genai_export
from tests.graph import quantized as graphs
from tests.plugins.diagnose.remedy.test_locate import WORK
from tests.refusals import refused


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


def test_node_that_rounds_activations_is_named_and_no_entry(tmp_path: Path) -> None:
    stored = graphs.qdq(None)
    floats = GraphWeights(graphs.plain(stored.matrix + np.float32(1e-4)), tmp_path)
    quantized = GraphWeights(with_pair(stored), tmp_path)
    assert [*rounded_inside(floats, quantized)] == ["x_Quantize"]
    assert not pair(floats, quantized).unpaired
    assert not rounded_inside(floats, GraphWeights(stored.model, tmp_path))


class Texts(CalibrationDataReader):
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
def test_loss_of_rounded_activations_is_what_other_kernels_add(tmp_path: Path) -> None:
    found = olive_ext.locate(
        rounded_by_ort(tmp_path / "qdq"), reference=quickstart.exported(), **{**WORK, "limit": 4}, top=3
    )
    assert len(found.entries) == 21
    assert len(found.unpaired) >= 21
    assert all(name.endswith("QuantizeLinear") for name in found.unpaired)
    assert found.kernels.mean > found.model_kl.mean / 2
    assert found.sentences[0] == found.rest


def share(floats: Array, others: Array, bits: int, *, is_symmetric: bool = True) -> float:
    rounded = graphs.to_nearest(graphs.plain(others), bits, is_symmetric=is_symmetric)
    (pair,) = pairs_of(*(GraphWeights(one, Path()) for one in (graphs.plain(floats), rounded))).values()
    return distance(*pair).share


@pytest.mark.parametrize(("bits", "noise"), [(4, 0.3), (8, 0.05)])
def test_another_checkpoint_is_told(bits: int, noise: float) -> None:
    weight = graphs.random_weight(1)
    found = share(weight, weight + noise * graphs.random_weight(2), bits)
    assert 0.05 < found < 1
    (told,) = doubt({}, {"w": found})
    assert told.startswith(f"{100 * found:.0f} % of the numbers, and {100 * found:.0f} % of those of 'w', lie farther")


NODES = [f"/model/layers.{layer}/attn/GroupQueryAttention" for layer in range(2)]


@pytest.mark.exporters
def test_cache_beside_weights_is_named_and_measured_as_the_rest(tmp_path: Path) -> None:
    tasks = local_tasks.write_tasks(tmp_path / "tasks")
    work = {"tasks": ["tiny_choice", "tiny_rolling"], "include_path": tasks, "top": 1}
    reference, options = genai_export("llama", "0.18.0"), ("kv_cache_quant_scheme=int4_per_tensor",)
    cached, plain = (
        olive_ext.locate(genai_export("llama", "0.18.0", "int4", options=own), reference=reference, **work)
        for own in (options, ())
    )
    assert [name for name, why in cached.unpaired.items() if "KV cache" in why] == NODES
    assert {entry.name for entry in cached.entries} == {entry.name for entry in plain.entries}
    assert cached.total.mean == plain.total.mean
    assert cached.kernels.mean > 10 * abs(plain.kernels.mean)


@pytest.mark.exporters
@pytest.mark.parametrize("call", ["locate", "mend"])
def test_model_whose_cache_alone_is_quantized_has_no_weight(call: str, tmp_path: Path) -> None:
    tasks = local_tasks.write_tasks(tmp_path / "tasks")
    work = {"tasks": ["tiny_choice"], "include_path": str(tasks), "output_dir": str(tmp_path / "made")}
    work |= {"within": {"kl_mean": 0.1}} if call == "mend" else {}
    model = str(genai_export("llama", "0.18.0", options=("kv_cache_quant_scheme=int4_per_tensor",)))
    with refused(ModelError, "not_comparable"):
        getattr(olive_ext, call)(model, reference=str(genai_export("llama", "0.18.0")), **work)


def attention(name: str, **attributes: object) -> GraphWeights:
    node = helper.make_node(
        "GroupQueryAttention", ["q", "", "", "pk", "pv"], ["y", "k", "v"], name, domain="com.microsoft", **attributes
    )
    x = helper.make_tensor_value_info("q", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", [x], [onnx.ValueInfoProto(name="y")])
    return GraphWeights(helper.make_model(graph), Path())


def test_attention_whose_cache_alone_one_graph_quantizes_is_named() -> None:
    name, scheme = "/layers.0/attn/GQA", {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    plain, whole = attention(name), attention(name, **scheme)
    assert [*rounded_inside(plain, whole)] == [*rounded_inside(attention("other"), whole)] == [name]
    assert not rounded_inside(whole, whole)
    assert not rounded_inside(plain, plain)
