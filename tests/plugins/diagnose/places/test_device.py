"""One model on WebGPU and on the CPU: rounding of the kernels, and a kernel that is wrong on one of them is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.report import Report
from tests.device.open import LIBRARY
from tests.exports.quickstart import exported
from tests.plugins.diagnose.places.pairs import compared
from tests.plugins.diagnose.places.planted import planted

pytestmark = [pytest.mark.webgpu, pytest.mark.slow]


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
