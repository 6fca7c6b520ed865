"""A package that is not what it says, or that has no kernels here, is refused by name before anything runs."""

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
from tests.exports import export, genai_export
from tests.refusals import refused

Spoil = Callable[[Path], object]


def _config(edit: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "genai_config.json"
        config = json.loads(path.read_text())
        edit(config["model"]["decoder"])
        path.write_text(json.dumps(config))

    return spoil


def _graph(edit: Callable[[onnx.GraphProto], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        edit(model.graph)
        onnx.save(model, folder / "model.onnx")

    return spoil


def _cut(name: str, fraction: float) -> Spoil:
    def spoil(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * fraction)])

    return spoil


def _lose_present(graph: onnx.GraphProto) -> None:
    del graph.output[[output.name for output in graph.output].index("present.1.key")]


def _name_other_logits(folder: Path) -> None:
    _config(lambda decoder: decoder["outputs"].update(logits="scores"))(folder)
    _graph(lambda graph: graph.output.add(name="logits_2", type=graph.output[0].type))(folder)


MYSTERY = helper.make_tensor_value_info("mystery", TensorProto.FLOAT, ["B"])
SPOILT: dict[str, tuple[Spoil, dict[str, Any]]] = {
    "input": (_graph(lambda graph: graph.input.append(MYSTERY)), {"code": "unsupported", "holds": "mystery"}),
    "tokens": (
        _graph(lambda graph: setattr(graph.input[0].type.tensor_type, "elem_type", TensorProto.FLOAT)),
        {"code": "unsupported", "holds": ("input_ids", "FLOAT")},
    ),
    "present": (_graph(_lose_present), {"code": "unsupported", "holds": ("past_key_values.1.key", "present.1.key")}),
    "logits": (_name_other_logits, {"code": "unsupported", "holds": "logits_2"}),
    "cut weights": (_cut("model.onnx.data", 0.5), {"code": "damaged", "holds": "model.onnx"}),
    "weights": (
        lambda folder: (folder / "model.onnx.data").unlink(),
        {"code": "not_found", "holds": "model.onnx.data"},
    ),
    "cut graph": (_cut("model.onnx", 0.1), {"code": "damaged", "holds": "model.onnx"}),
    "file": (
        _config(lambda decoder: decoder.update(filename="decoder.onnx")),
        {"code": "missing", "field": "onnx_file_name", "holds": "decoder.onnx"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_package_is_refused_by_name(name: str, tmp_path: Path) -> None:
    spoil, reason = SPOILT[name]
    folder = Path(shutil.copytree(genai_export("llama"), tmp_path / "model"))
    spoil(folder)
    with refused(ModelError, **reason) as error:
        olive_ext.open(folder)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_head_size_that_contradicts_the_graph_is_refused_by_number(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(genai_export("llama", "0.18.0"), tmp_path / "model"))
    _config(lambda decoder: decoder.update(head_size=32))(folder)
    with refused(ModelError, "unsupported", holds=("head_size", "32", "16")):
        olive_ext.open(folder)


@pytest.mark.exporters
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("qwen3-genai-0.18-bf16-cuda", "MatMul"), ("qwen3-genai-0.18-kvfp8-cuda", "GroupQueryAttention")],
)
def test_type_without_a_kernel_is_refused_by_one_line(name: str, kernel: str) -> None:
    with refused(ModelError, "unsupported", holds=kernel) as error:
        olive_ext.open(export(name).path, execution_provider="cpu")
    assert "\n" not in str(error.value)
