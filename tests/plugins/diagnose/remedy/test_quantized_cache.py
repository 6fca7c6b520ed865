"""A quantized KV cache is one target: the float graph with it loses what the exporter's own export with it loses."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import olive_ext
from olive_ext.errors import ModelError
from olive_ext.plugins.diagnose.remedy.loss_map import LossMap
from olive_ext.plugins.diagnose.remedy.roundings import quantized_cache
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights
from tests.backends import local_tasks
from tests.exports.genai import genai_export


def cached(scheme: str, precision: str = "fp32") -> Path:
    return genai_export("llama", "0.18.0", precision, options=(f"kv_cache_quant_scheme={scheme}",))


def located(model: Path, folder: Path) -> LossMap:
    tasks = local_tasks.write_tasks(folder / "tasks")
    work = {"tasks": ["tiny_choice", "tiny_rolling"], "include_path": tasks, "top": 1}
    return olive_ext.locate(model, reference=genai_export("llama", "0.18.0"), **work)


@pytest.mark.exporters
@pytest.mark.parametrize("scheme", ["int8_per_channel", "int4_per_tensor"])
def test_cache_alone_explains_all_that_its_export_loses(scheme: str, tmp_path: Path) -> None:
    before = sorted(genai_export("llama", "0.18.0").iterdir())
    found = located(cached(scheme), tmp_path)
    (entry,) = found.entries
    assert (entry.name, entry.layer, entry.bytes) == ("KV cache", None, 0)
    assert entry.nodes == tuple(f"/model/layers.{layer}/attn/GroupQueryAttention" for layer in range(2))
    assert entry.kl > 1e-3
    assert entry.kl == pytest.approx(found.model_kl.mean, rel=1e-4)
    assert not found.unpaired
    assert sorted(genai_export("llama", "0.18.0").iterdir()) == before


@pytest.mark.exporters
def test_cache_and_weights_are_measured_alone_and_together(tmp_path: Path) -> None:
    found = located(cached("int4_per_tensor", "int4"), tmp_path)
    names = [entry.name for entry in found.entries]
    assert len(names) > 11
    assert names.count("KV cache") == 1
    assert found.total.mean == pytest.approx(found.model_kl.mean, rel=0.02)
    assert found.total.mean > max(entry.kl for entry in found.entries)


@pytest.mark.exporters
def test_model_whose_cache_alone_is_quantized_has_no_weight_to_mend(tmp_path: Path) -> None:
    tasks = local_tasks.write_tasks(tmp_path / "tasks")
    work = {"tasks": ["tiny_choice"], "include_path": str(tasks), "within": {"kl_mean": 0.1}}
    model, reference = str(cached("int4_per_tensor")), str(genai_export("llama", "0.18.0"))
    with pytest.raises(ModelError, match="no weight of the model is stored otherwise"):
        olive_ext.mend(model, reference=reference, output_dir=str(tmp_path / "mended"), **work)


def attention(name: str, **attributes: object) -> GraphWeights:
    node = helper.make_node(
        "GroupQueryAttention", ["q", "", "", "pk", "pv"], ["y", "k", "v"], name, domain="com.microsoft", **attributes
    )
    x = helper.make_tensor_value_info("q", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", [x], [onnx.ValueInfoProto(name="y")])
    return GraphWeights(helper.make_model(graph), Path())


def test_attention_is_paired_by_its_name() -> None:
    scheme = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    float_one, whole = attention("/layers.0/attn/GQA"), attention("/layers.0/attn/GQA", **scheme)
    unpaired: dict[str, str] = {}
    found = quantized_cache(float_one, whole, unpaired)
    assert found is not None
    assert found.nodes == ("/layers.0/attn/GQA",)
    assert quantized_cache(whole, whole, unpaired) is None
    assert quantized_cache(float_one, float_one, unpaired) is None
    assert not unpaired
    assert quantized_cache(attention("/layers.1/attn/GQA"), whole, unpaired) is None
    assert "no attention of that name" in unpaired["/layers.0/attn/GQA"]
