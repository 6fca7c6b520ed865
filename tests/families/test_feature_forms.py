"""Features of other forms than [rows, size]: with rows of padding that a mask or a number tells, as several tensors.

LLaVA 1.5's package, whose graphs are given these forms by hand and compute what they did: numbers are transformers'.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import olive_ext
from olive_ext.errors import TaskError
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports.media import media_export
from tests.families.pictures import PictureReference, picture
from tests.refusals import refused

pytestmark = pytest.mark.slow
ROWS, SIZE = 16, 64
PICTURES = [picture(0, 40, 40), picture(1, 60, 30)]
FORMS = {"mask": [False, True] + [True] * (ROWS - 1) + [False], "number": [True] * ROWS + [False, False]}


def _padded(form: str, names: tuple[str, ...]) -> onnx.GraphProto:
    """`names` [1, rows, 64], which add up to `x` [16, 64] where they are not padding, and what tells the latter."""
    real = FORMS[form]
    before, after = real.index(True), len(real) - ROWS - real.index(True)
    share = np.float32(1 / len(names))
    weights = [
        numpy_helper.from_array(np.full((before, SIZE), np.nan, np.float32), "before"),
        numpy_helper.from_array(np.full((after, SIZE), np.nan, np.float32), "after"),
        numpy_helper.from_array(share, "share"),
        numpy_helper.from_array(np.array([0]), "first_axis"),
        numpy_helper.from_array(np.array([real]) if form == "mask" else np.array([ROWS]), "told_value"),
    ]
    nodes = [
        helper.make_node("Concat", ["before", "x", "after"], ["rows"], axis=0),
        helper.make_node("Unsqueeze", ["rows", "first_axis"], ["batched"]),
        *(helper.make_node("Mul", ["batched", "share"], [name]) for name in names),
        helper.make_node("Identity", ["told_value"], ["feature_mask" if form == "mask" else "feature_lengths"]),
    ]
    kind, shape = (TensorProto.BOOL, [1, len(real)]) if form == "mask" else (TensorProto.INT64, [1])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, len(real), SIZE]) for name in names]
    told = helper.make_tensor_value_info(nodes[-1].output[0], kind, shape)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, SIZE])
    return helper.make_graph(nodes, "padded", [given], [*outputs, told], weights)


def _sum(names: tuple[str, ...]) -> onnx.GraphProto:
    """`x` = the sum of `names` [rows, 64]."""
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", SIZE]) for name in names]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", SIZE])
    return helper.make_graph([helper.make_node("Sum", names, ["x"])], "sum", given, [x])


def _joined(first: onnx.ModelProto, second: onnx.ModelProto, link: tuple[str, str]) -> onnx.ModelProto:
    left, right = (onnx.compose.add_prefix_graph(model.graph, "", inplace=False) for model in (first, second))
    graph = onnx.compose.merge_graphs(left, right, [link])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _package(folder: Path, form: str, names: tuple[str, ...], taken: tuple[str, ...]) -> Path:
    """LLaVA 1.5 whose encoder returns `names`, and whose embedding graph takes `taken`."""
    source, _ = media_export("llava_clip")
    shutil.copytree(source, folder)
    opsets = {"opset_imports": [helper.make_opsetid("", 18)], "ir_version": 10}
    vision, embedding = (onnx.load(folder / f"{name}.onnx") for name in ("vision", "embedding"))
    _rename(vision.graph, "image_features", "tower_features")
    _rename(embedding.graph, "image_features", "placed_features")
    padded, added = helper.make_model(_padded(form, names), **opsets), helper.make_model(_sum(taken), **opsets)
    onnx.save(_joined(vision, padded, ("tower_features", "x")), folder / "vision.onnx")
    onnx.save(_joined(added, embedding, ("x", "placed_features")), folder / "embedding.onnx")
    return folder


def _rename(graph: onnx.GraphProto, name: str, new: str) -> None:
    for value in (*graph.input, *graph.output):
        value.name = new if value.name == name else value.name
    for node in graph.node:
        node.input[:] = [new if given == name else given for given in node.input]
        node.output[:] = [new if made == name else made for made in node.output]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", [("image_features",), ("image_features", "image_features_of_layer_1")])
def test_features_of_every_form_give_transformers_numbers(tmp_path: Path, form: str, names: tuple[str, ...]) -> None:
    package = _package(tmp_path / "package", form, names, names)
    reference = PictureReference("llava_clip", media_export("llava_clip")[1])
    asked = [(f"Ann {verb} the <image> and", " blue stone", [one]) for verb in ("sees", "paints") for one in PICTURES]
    asked.append(("<image> and <image> are", " a letter", PICTURES))
    with olive_ext.open(package, engine={"num_slots": 3, "chunk_size": ROWS}) as session:
        found = session.loglikelihood([ScoringRequest(text, target, images=images) for text, target, images in asked])
        (answer,) = session.generate([GenerationRequest(asked[0][0], max_new_tokens=8, images=PICTURES[:1])])
        execution = session.describe_execution()
    for output, (text, target, images) in zip(found, asked, strict=True):
        assert output.token_logprobs == pytest.approx(reference.score(text, target, images), abs=1e-4)
    ids = reference.ids(asked[0][0], PICTURES[:1])
    assert reference.continues(ids, PICTURES[:1], answer.tokens, 8)
    assert execution["images_encoded"] == len(PICTURES)
    assert execution["image_feature_bytes"] == len(PICTURES) * len(names) * ROWS * SIZE * 4


def test_encoder_that_lacks_one_of_several_features_is_told_with_both(tmp_path: Path) -> None:
    names = ("image_features", "image_features_of_layer_1")
    package = _package(tmp_path / "package", "mask", names[:1], names)
    facts = ("vision.onnx", "image_features, feature_mask", "image_features_of_layer_1")
    with refused(TaskError, "unsupported", holds=facts), olive_ext.open(package) as session:
        session.loglikelihood([ScoringRequest("<image> and", " stone", images=PICTURES[:1])])
