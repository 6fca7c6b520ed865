"""A layer with noise ranks first: five families, three exporters, products and experts, in packages that they made."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

import olive_ext
from tests.backends import local_tasks
from tests.exports.genai import genai_export
from tests.exports.media import media_export
from tests.exports.mobius import mobius_export
from tests.exports.optimum import optimum_export

pytestmark = pytest.mark.exporters

CASES = {
    "llama, builder": (lambda: genai_export("llama"), "/model/layers.0/mlp/gate_proj/MatMul"),
    "llama, mobius": (lambda: mobius_export("llama"), "model/layers.1/mlp/up_proj/MatMul"),
    "llama, optimum": (lambda: optimum_export("llama"), "/model/layers.0/self_attn/v_proj/MatMul"),
    "gemma3_text, tied, builder": (lambda: genai_export("gemma3_text"), "/model/layers.3/attn/o_proj/MatMul"),
    "gemma3_text, tied, mobius": (lambda: mobius_export("gemma3_text"), "lm_head/MatMul"),
    "qwen3_moe, an expert, mobius": (
        lambda: mobius_export("qwen3_moe"),
        "model/layers.1/mlp/experts.2/down_proj/MatMul",
    ),
    "lfm2, a hybrid, builder": (lambda: genai_export("lfm2"), "/model/layers.0/conv/in_proj/MatMul"),
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return local_tasks.write_tasks(tmp_path / "tasks")


def in_bits(source: Path, folder: Path, graphs: str = "**/*.onnx", bits: int = 8, op: str = "MatMul") -> Path:
    """The package with the products, or lookups, of some graphs in blocks of 32 numbers, by ONNX Runtime's tool."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("builder-cache"), dirs_exist_ok=True)
    for graph in source.glob(graphs):
        config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, bits=bits, op_types_to_quantize=(op,))
        quantizer = MatMulNBitsQuantizer(onnx.load(graph), algo_config=config)
        quantizer.process()
        made = folder / graph.relative_to(source)
        for file in made.parent.glob(f"{made.name}*"):
            file.unlink()
        quantizer.model.save_model_to_file(str(made), True)
    return folder


def corrupt(package: Path, chosen: Callable[[onnx.NodeProto], int | None], noise: np.ndarray) -> None:
    """Adds numbers that are drawn from `noise` to the packed bytes of the input that `chosen` gives of one node."""
    (graph,) = package.glob("*.onnx")  # a folder of a package of several
    model = onnx.load(graph)
    ((node, index),) = [(node, chosen(node)) for node in model.graph.node if chosen(node) is not None]
    tensor = next(one for one in model.graph.initializer if one.name == node.input[index or 0])
    numbers = numpy_helper.to_array(tensor)
    drawn = np.random.default_rng(0).choice(noise, numbers.shape)
    tensor.CopyFrom(numpy_helper.from_array(numbers ^ drawn.astype(np.uint8), tensor.name))
    for file in package.glob(f"{graph.name}*"):
        file.unlink()
    onnx.save(model, graph)


def first(package: Path, reference: Path, tasks: Path) -> str:
    work = {"tasks": ["tiny_choice", "tiny_rolling"], "include_path": tasks, "top": 1}
    return olive_ext.locate(package, reference=reference, **work).entries[0].name


@pytest.mark.parametrize("case", CASES)
def test_corrupted_product_ranks_first(case: str, tmp_path: Path, tasks: Path) -> None:
    export, name = CASES[case]
    package = in_bits(export(), tmp_path / "package")
    corrupt(package, lambda node: 1 if node.name.startswith(name) else None, np.arange(0, 64, 8))
    assert first(package, export(), tasks) == name


@pytest.mark.parametrize("is_float_split", [False, True])
def test_corrupted_part_of_a_product_ranks_first_as_the_whole(
    is_float_split: bool, tmp_path: Path, tasks: Path
) -> None:
    """One export has queries, keys and values as one product, the other apart."""
    whole, split = genai_export("llama"), genai_export("llama", options=("disable_qkv_fusion=true",))
    package = in_bits(whole if is_float_split else split, tmp_path / "package")
    name = f"/model/layers.1/attn/{'qkv_proj' if is_float_split else 'v_proj'}/MatMul"
    corrupt(package, lambda node: 1 if node.name.startswith(name) else None, np.arange(0, 64, 8))
    assert first(package, split if is_float_split else whole, tasks) == "/model/layers.1/attn/qkv_proj/MatMul"


def test_corrupted_experts_rank_first(tmp_path: Path, tasks: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(genai_export("gpt_oss", "0.14.1", "int4"), package)
    corrupt(package, lambda node: 2 if node.name == "/model/layers.0/moe/QMoE" else None, np.array([0, 0x33]))
    assert first(package, genai_export("gpt_oss", "0.14.1"), tasks) == "/model/layers.0/moe/MoE/fc1"


PICTURES = Path(__file__).parents[4] / "recipes" / "vision" / "tasks"

IN_ENCODERS = {
    "llava": ("**/*.onnx", "vision_encoder/vision_tower/vision_model/encoder/layers.0/mlp/down_proj/MatMul"),
    # Of these random models the head loses more than the encoder could.
    "gemma3": ("vision_encoder/*.onnx", "vision_encoder/multi_modal_projector/MatMul"),
    "qwen2_5_vl": ("vision_encoder/*.onnx", "vision_encoder/visual/merger/mlp_0/MatMul"),
}


@pytest.mark.parametrize("family", IN_ENCODERS)
def test_corrupted_product_of_a_vision_encoder_ranks_first(family: str, tmp_path: Path) -> None:
    source, (graphs, name) = media_export(family)[0], IN_ENCODERS[family]
    package = in_bits(source, tmp_path / "package", graphs)
    corrupt(package / "vision_encoder", lambda node: 1 if node.name.startswith(name) else None, np.arange(0, 64, 8))
    work = {"tasks": ["shapes_colour"], "include_path": PICTURES, "limit": 6, "top": 1}
    found = olive_ext.locate(package, reference=source, **work)
    assert found.entries[0].name == f"{name}, vision"
    assert found.entries[0].layer is None
    assert found.total.mean == pytest.approx(found.model_kl.mean, rel=1e-3)
