"""A package that is not what it says is refused by name before anything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import olive_ext
from olive_ext.errors import ModelError
from tests.exports import genai_export
from tests.refusals import refused

pytestmark = pytest.mark.slow


def _extra_input(folder: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info("mystery", TensorProto.FLOAT, ["B"]))

    _edit_graph(folder, edit)


def _float_tokens(folder: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT

    _edit_graph(folder, edit)


def _lost_present(folder: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        names = [output.name for output in model.graph.output]
        del model.graph.output[names.index("present.1.key")]

    _edit_graph(folder, edit)


def _other_logits(folder: Path) -> None:
    _edit_config(folder, lambda config: config["model"]["decoder"]["outputs"].update(logits="scores"))
    _edit_graph(folder, lambda model: model.graph.output.append(model.graph.output[0]))
    _edit_graph(folder, _rename_two_logits)


def _rename_two_logits(model: onnx.ModelProto) -> None:
    model.graph.output[-1].name = "logits_2"


def _cut_weights(folder: Path) -> None:
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def _no_weights(folder: Path) -> None:
    (folder / "model.onnx.data").unlink()


def _cut_graph(folder: Path) -> None:
    graph = folder / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:5000])


def _wrong_file_name(folder: Path) -> None:
    _edit_config(
        folder,
        lambda config: config["model"]["decoder"].update(filename="decoder.onnx"),
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_extra_input, {"code": "unsupported", "holds": "mystery"}),
        (_float_tokens, {"code": "unsupported", "holds": ("input_ids", "FLOAT")}),
        (_lost_present, {"code": "unsupported", "holds": ("past_key_values.1.key", "present.1.key")}),
        (_other_logits, {"code": "unsupported", "holds": "logits_2"}),
        (_cut_weights, {"code": "damaged", "holds": "model.onnx"}),
        (_no_weights, {"code": "not_found", "holds": "model.onnx.data"}),
        (_cut_graph, {"code": "damaged", "holds": "model.onnx"}),
        (_wrong_file_name, {"code": "missing", "field": "onnx_file_name", "holds": "decoder.onnx"}),
    ],
)
def test_spoilt_package_is_refused_by_name(
    spoil: Callable[[Path], None], reason: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(genai_export("llama"), folder)
    spoil(folder)
    with refused(ModelError, **reason) as error:
        olive_ext.open(folder)
    assert "\n" not in str(error.value)


def test_head_size_that_contradicts_the_graph_is_refused_by_number(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(genai_export("llama", "0.18.0"), folder)
    _edit_config(folder, lambda config: config["model"]["decoder"].update(head_size=32))
    with refused(ModelError, "unsupported", holds=("head_size", "32", "16")):
        olive_ext.open(folder)


def _edit_config(folder: Path, edit: Callable[[dict], object]) -> None:
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def _edit_graph(folder: Path, edit: Callable[[onnx.ModelProto], object]) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    edit(model)
    onnx.save(model, folder / "model.onnx")
