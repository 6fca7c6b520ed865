"""What noise may explain, and no node: green is what nodes hold, or what noise was seen to do where they cannot run."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from olive_ext.config import EvaluationConfig
from olive_ext.report.place import Place
from olive_ext.run.recording import record
from tests.exports.cache import once
from tests.exports.quickstart import exported, quantized
from tests.plugins.diagnose.places.pairs import WORK, compared
from tests.plugins.diagnose.places.planted import planted

pytestmark = [pytest.mark.slow, pytest.mark.long]

GATE = 14


@cache
def dynamic() -> Path:
    """Weights and activations of 8 bits, the activations' scale measured as they come."""

    def build(folder: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic

        for file in exported().iterdir():
            if not file.name.startswith(("model.onnx", "cache")):
                shutil.copy(file, folder)
        quantize_dynamic(exported() / "model.onnx", folder / "model.onnx", op_types_to_quantize=["MatMul"])

    return once("quickstart-dynamic", [exported().name], build)


def place_of(reference: Any, model: Path, **settings: Any) -> Place:
    found = compared(reference, model, **settings).comparison.place
    assert isinstance(found, Place)
    return found


def test_fault_within_rounding_of_activations_is_found_by_its_node(tmp_path: Path) -> None:
    """A scale 1 % too large is less than rounding to 8 bits does; on equal inputs one kernel gives one result."""
    model = quantized(4, 32, accuracy_level=4)
    node = planted(model, tmp_path / "model", GATE, factor=1.01)
    place = place_of({"path": str(model), "is_same_model": True}, tmp_path / "model")
    assert place.largest < place.kernel_limit
    assert (place.kind, place.first.node, place.reason) == ("different", node.name, "")


def test_records_hold_no_node_and_rounding_of_activations_is_not_green(tmp_path: Path) -> None:
    """The same against records cannot be told, with the reason; equal numbers are the same without any node."""
    model = quantized(4, 32, accuracy_level=4)
    record(EvaluationConfig.of(model, WORK), tmp_path / "float.records")
    planted(model, tmp_path / "model", GATE, factor=1.01)
    reference = {"path": str(tmp_path / "float.records"), "is_same_model": True}
    place = place_of(reference, tmp_path / "model")
    assert (place.kind, "both places are on one machine" in place.reason) == ("cannot_tell", True)
    assert place_of(reference, model, engine={"num_threads": 1}).kind == "same"


def test_model_without_a_scale_is_held_by_its_nodes(tmp_path: Path) -> None:
    """Where no product's input can be moved, equal numbers are the same, and a fault is its node's."""
    model = dynamic()
    assert place_of({"path": "same_model", "engine": {"num_threads": 1}}, model).kind == "same"
    place = place_of({"path": str(model), "is_same_model": True}, shifted(model, tmp_path / "model"))
    assert (place.kind, place.first.node) == ("different", "/model/layers.0/mlp/gate_proj/MatMul_quant_scales_mul")


def shifted(model: Path, folder: Path) -> Path:
    """A copy with one product's scale 1 % too large."""
    shutil.copytree(model, folder)
    proto = onnx.load(folder / "model.onnx")
    name = "model.layers.0.mlp.gate_proj.MatMul.weight_scale"
    scale = next(one for one in proto.graph.initializer if one.name == name)
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(1.01), scale.name))
    onnx.save(proto, folder / "model.onnx")
    return folder
