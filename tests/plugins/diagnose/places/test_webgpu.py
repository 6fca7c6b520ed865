"""The node that differs between WebGPU and the CPU: planted ones, and none in healthy models. One model on both:
rounding of the kernels, and a kernel that is wrong on one of them is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from olive_ext.config import ModelSettings
from olive_ext.plugins.diagnose.places.first_difference import FirstDifference, first_difference
from olive_ext.plugins.diagnose.places.place import NotLocatedError
from olive_ext.report import Report
from tests.device.open import LIBRARY, STEP, why_no_webgpu
from tests.exports import VOCAB, genai_export
from tests.exports.quickstart import exported
from tests.plugins.diagnose.places.planted import compared, planted
from tests.plugins.diagnose.places.test_first_difference import run_repro

pytestmark = pytest.mark.webgpu

TOKENS = np.random.default_rng(0).integers(4, VOCAB, STEP).tolist()


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    if reason := why_no_webgpu():
        pytest.skip(reason)


def found(candidate: Path, other: Path, repro: Path | None = None) -> FirstDifference:
    device = ModelSettings(model=str(candidate), execution_provider="webgpu", provider_libraries=LIBRARY)
    return first_difference(device, ModelSettings(model=str(other)), TOKENS[:STEP], repro=repro)


@pytest.mark.parametrize(
    ("precision", "operator", "place"),
    [
        ("fp32", "Gather", 0),
        ("fp32", "SimplifiedLayerNormalization", 0),
        ("fp32", "GroupQueryAttention", 1),
        ("fp32", "MatMul", 6),
        ("fp32", "SkipSimplifiedLayerNormalization", 3),
        ("fp32", "Mul", 2),
        ("int4", "MatMulNBits", 8),
        ("int4", "GroupQueryAttention", 0),
    ],
)
def test_planted_kernel_is_found_on_webgpu(tmp_path: Path, precision: str, operator: str, place: int) -> None:
    """Of all nodes it is the one that was rewritten, in the first layer as in the last."""
    source = genai_export("llama", precision=precision)
    nodes = onnx.load(source / "model.onnx", load_external_data=False).graph.node
    floats = [number for number, node in enumerate(nodes) if node.op_type == operator and "attn_mask" not in node.name]
    node = planted(source, tmp_path / "planted", floats[place])
    result = found(tmp_path / "planted", source, tmp_path / "repro" if place == 0 else None)
    print(f"\n{result}")
    assert result.output in node.output
    if result.repro is not None:
        assert run_repro(result.repro).returncode == 1


@pytest.mark.parametrize("precision", ["fp32", "int4", "fp16"])
def test_healthy_kernels_are_all_within_their_tolerance(precision: str) -> None:
    """Rounding has no first node: the same export, and fp16 on WebGPU against fp32 on the CPU."""
    candidate = genai_export("llama", precision=precision, provider="webgpu" if precision == "fp16" else "cpu")
    with pytest.raises(NotLocatedError, match=r"many nodes|no difference") as raised:
        found(candidate, genai_export("llama", precision="fp32" if precision == "fp16" else precision))
    print(f"\n{raised.value}")


def on_webgpu(reference: Any, model: Path | None = None) -> Report:
    """The model on the device against `reference` on the CPU."""
    elsewhere = {"execution_provider": "cpu", **reference}
    device = {"execution_provider": "webgpu", "provider_libraries": LIBRARY}
    return compared(elsewhere, model, **device, tasks=["quickstart_letters"], limit=4)


def test_device_differs_by_the_rounding_of_its_kernels_at_most() -> None:
    """In float32 both give the same but for rounding, and the report says how large that is."""
    place = on_webgpu({"path": "same_model"}).comparison.place
    assert place.kind in ("same", "kernels")
    assert place.largest < 1e-4
    assert place.model.startswith("WebGpuExecutionProvider")
    assert place.reference.startswith("CPUExecutionProvider")


def test_wrong_kernel_on_the_device_is_found(tmp_path: Path) -> None:
    """A node rewritten on the device's side, by 1 % of half of its weights, is no rounding. Which node is not asked
    here: a software device gets attention over more than 31 tokens wrong, which the engine avoids by short steps."""
    planted(exported(), tmp_path / "wrong", 14, factor=1.01)
    place = on_webgpu({"path": str(exported()), "is_same_model": True}, tmp_path / "wrong").comparison.place
    assert place.kind == "different"
    assert place.rms > max(one.rms for one in place.noise if one.is_rounding)
