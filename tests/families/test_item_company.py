"""What items of one run of an encoder may do to each other: packages whose encoders are edited so that it shows for
some numbers of items, sizes or contents only. Each item keeps the features that it has alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import olive_ext
from olive_ext.errors import ConfigError
from olive_ext.session.requests import ScoringRequest
from tests.exports.media import MEDIA_FAMILIES, plain_encoder_export, plain_items_export
from tests.families.pictures import picture
from tests.refusals import refused

pytestmark = pytest.mark.slow

PICTURES = [picture(seed, 32, 32) for seed in range(11)]
node = helper.make_node


def _flag(*nodes: NodeProto, result: str = "flag") -> list[NodeProto]:
    """A number of one item is added to all features where the bool `result` of a run is true."""
    return [
        *nodes,
        node("Cast", [result], ["factor"], to=TensorProto.FLOAT),
        node("ReduceMax", ["own"], ["most"], keepdims=0),
        node("Mul", ["most", "factor"], ["more"]),
        node("Add", ["own", "more"], ["image_features"]),
    ]


COUNT = [node("Shape", ["pixel_values"], ["count"], start=0, end=1)]
LEAKS = {
    "from four items on": _flag(*COUNT, node("GreaterOrEqual", ["count", "four"], ["flag"])),
    "for eight items only": _flag(*COUNT, node("Equal", ["count", "eight"], ["flag"])),
    "scale by the largest value of a run": [
        node("Abs", ["pixel_values"], ["sizes"]),
        node("ReduceMax", ["sizes"], ["largest"], keepdims=0),
        node("Max", ["largest", "tiny"], ["bound"]),
        node("Div", ["own", "bound"], ["image_features"]),
    ],
    "dynamic quantization": [
        node("DynamicQuantizeLinear", ["own"], ["bytes", "scale", "zero"]),
        node("DequantizeLinear", ["bytes", "scale", "zero"], ["image_features"]),
    ],
    "the fifth item gets the sixth": [
        node("Slice", ["own", "five", "six", "first_axis"], ["sixth"]),
        node("ReduceSum", ["sixth"], ["sum"], keepdims=0),
        node("Unsqueeze", ["places", "second_axes"], ["places_B11"]),
        node("Slice", ["places_B11", "zero_place", "count", "first_axis"], ["own_places"]),
        node("Mul", ["sum", "own_places"], ["more"]),
        node("Add", ["own", "more"], ["image_features"]),
    ],
}
LEAKS["the fifth item gets the sixth"] = [*COUNT, *LEAKS["the fifth item gets the sixth"]]
WEIGHTS = {
    "four": np.array([4]),
    "eight": np.array([8]),
    "tiny": np.float32(1e-3),
    "five": np.array([5]),
    "six": np.array([6]),
    "first_axis": np.array([0]),
    "zero_place": np.array([0]),
    "places": (np.arange(128) == 4).astype(np.float32),
    "second_axes": np.array([1, 2]),
}


def _leaking(folder: Path, leak: str) -> Path:
    package = folder / "package"
    shutil.copytree(plain_encoder_export("f32", "default"), package)
    file = package / "vision_encoder" / "model.onnx"
    proto = onnx.load(file)
    proto.graph.node[-1].output[0] = "own"
    proto.graph.node.extend(LEAKS[leak])
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in WEIGHTS.items())
    onnx.save(proto, file)
    return package


@pytest.mark.parametrize("leak", LEAKS)
def test_items_keep_the_features_that_each_has_alone(tmp_path: Path, leak: str) -> None:
    package = _leaking(tmp_path, leak)
    asked = [ScoringRequest("<image> and", " stone", images=[one]) for one in PICTURES]
    found, facts = {}, {}
    for rows in (1, 1024):
        with olive_ext.open(package, engine={"encoder_batch_rows": rows, "num_slots": 3}) as session:
            found[rows] = [output.logprob for output in session.loglikelihood(asked)]
            facts = session.describe_execution()
    assert found[1024] == pytest.approx(found[1], abs=1e-5)
    assert "of the largest off those of each alone" in facts["images_one_by_one"]


def test_tail_that_changes_a_picture_is_left_out_or_refused_by_name(tmp_path: Path) -> None:
    """A bucket is filled up with pictures of zeros, which are company, too: here features are less their mean over all
    patches of a run."""
    package, marker = tmp_path / "package", MEDIA_FAMILIES["qwen2_5_vl"].marker
    shutil.copytree(plain_items_export("qwen2_5_vl", "f32", "webgpu"), package)
    file = package / "vision_encoder" / "model.onnx"
    proto = onnx.load(file)
    proto.graph.node[-1].output[0] = "own"
    proto.graph.node.append(node("ReduceMean", ["own"], ["mean"], keepdims=0))
    proto.graph.node.append(node("Sub", ["own", "mean"], ["image_features"]))
    onnx.save(proto, file)
    sizes = [(40, 40), (60, 30), (24, 70), (64, 64)]
    asked = [
        ScoringRequest(f"{marker} and", " stone", images=[picture(seed, *size)]) for seed, size in enumerate(sizes)
    ]
    found, facts = [], {}
    for shapes in ("any", "bucketed"):
        engine = {"shapes": shapes, "num_slots": 2, "chunk_size": 16}
        with olive_ext.open(package, execution_provider="cpu", engine=engine) as session:
            found.append([output.logprob for output in session.loglikelihood(asked)])
            facts = session.describe_execution()
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    told = "features of an item in a bucket are"
    assert told in facts["images_of_any_shape"]
    engine = {"strict_shapes": True, "num_slots": 2, "chunk_size": 16}
    with refused(ConfigError, "wrong_value", "engine.strict_shapes", holds=("model.onnx", told)):
        olive_ext.open(package, execution_provider="cpu", engine=engine)
