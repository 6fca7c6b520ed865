"""A quantized KV cache is no entry: it is named, and its loss is in what other kernels add."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import olive_ext
from olive_ext.errors import ModelError
from olive_ext.plugins.diagnose.remedy.variants import rounded_inside
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights
from tests.backends import local_tasks
from tests.exports.genai import genai_export
from tests.refusals import refused

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
