"""Packages whose decoder has more inputs for pictures than embeddings: text runs as without them, or all is refused.

Phi-4-multimodal's decoder, as mobius 0.1.0 makes it, takes `vision_gate` and `speech_gate`, which its embedding graph
returns; Qwen3-VL's, by other exporters, the features of inner layers of the tower.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.errors import ModelError, OliveExtError
from olive_ext.model import resolve
from olive_ext.session.requests import ScoringRequest
from tests.exports.media import MEDIA_FAMILIES, media_export
from tests.families.pictures import picture
from tests.refusals import refused

pytestmark = pytest.mark.slow
FAMILY = "qwen2_5_vl"
TEXT = [("Ann sees the", " blue stone"), ("Bob carries the heavy", " wheel")]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return Path(shutil.copytree(media_export(FAMILY)[0], tmp_path / "package"))


def _edited(file: Path) -> onnx.ModelProto:
    return onnx.load(file, load_external_data=False)


def _give_gate(package: Path) -> None:
    """The embedding graph returns 1 where it finds a picture, as mobius makes it."""
    file = package / "embedding" / "model.onnx"
    model = _edited(file)
    media = resolve(ModelSettings(model=str(package))).media
    assert media is not None
    (encoder,) = media.encoders
    nodes = [
        helper.make_node("Constant", [], ["gated_id"], value_int=encoder.placeholder),
        helper.make_node("Equal", ["input_ids", "gated_id"], ["is_gated"]),
        helper.make_node("Cast", ["is_gated"], ["gated"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["gated"], ["vision_gate"], keepdims=0),
    ]
    model.graph.node.extend(nodes)
    model.graph.output.append(helper.make_tensor_value_info("vision_gate", TensorProto.FLOAT, []))
    onnx.save(model, file)


def _take(package: Path, name: str, shape: list[int | str]) -> None:
    """The decoder adds 100 times the input to its embeddings: 1 in it would show."""
    file = package / "decoder" / "model.onnx"
    model = _edited(file)
    for node in model.graph.node:
        node.input[:] = ["switched" if given == "inputs_embeds" else given for given in node.input]
    nodes = [
        helper.make_node("Constant", [], ["hundred"], value_float=100.0),
        helper.make_node("Mul", [name, "hundred"], ["large"]),
        helper.make_node("Add", ["inputs_embeds", "large"], ["switched"]),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    onnx.save(model, file)


def _scores(package: Path) -> list[float]:
    with olive_ext.open(package) as session:
        found = [output.logprob for output in session.loglikelihood(TEXT)]
        marked = ScoringRequest(MEDIA_FAMILIES[FAMILY].marker, " stone", images=[picture(0, 40, 40)])
        with refused(OliveExtError, "unsupported", holds="vision_gate"):
            session.loglikelihood([marked])
    return found


def test_text_of_a_decoder_with_gates_runs_and_pictures_are_refused_by_name(package: Path) -> None:
    with olive_ext.open(package) as session:
        expected = [output.logprob for output in session.loglikelihood(TEXT)]
    _give_gate(package)
    assert _scores(package) == pytest.approx(expected, abs=1e-6)
    media = resolve(ModelSettings(model=str(package))).media
    assert media is not None
    assert "the decoder takes no such input" in media.problem
    _take(package, "vision_gate", [])
    assert _scores(package) == pytest.approx(expected, abs=1e-6)
    media = resolve(ModelSettings(model=str(package))).media
    assert media is not None
    assert "'vision_gate' is set by the tokens of one step" in media.problem


@pytest.mark.parametrize("name", ["deepstack_visual_embeds", "vision_gate"])
def test_input_that_no_graph_makes_is_refused_before_anything_runs(package: Path, name: str) -> None:
    _take(package, name, ["batch", "sequence", 64] if "deep" in name else [])
    with refused(ModelError, "unsupported", holds=name):
        olive_ext.open(package)
