"""A verdict that is reached on a device is that of the CPU, by a reference that is resident there or here."""

from __future__ import annotations

from typing import Any

import pytest

import olive_ext
from olive_ext.report import Report
from tests.device.open import LIBRARY
from tests.exports import quickstart

NATS = 5e-4
"""How far the mean distance on a device may be from the CPU's, which is 0.0022: kernels of int4 weights round
activations where they like."""


def _report(made_for: str, device: str, is_reference_there: bool = True) -> Report:
    library = {"provider_libraries": LIBRARY} if device == "webgpu" else {}
    # CUDA has no attention in float32.
    source = quickstart.exported("fp16", "cuda") if made_for == "cuda" else quickstart.exported()
    reference = {"path": str(source), "execution_provider": device if is_reference_there else "cpu"}
    given: dict[str, Any] = {**library, "reference": reference, "matters": 5}
    given["include_path"] = str(quickstart.TASKS)
    tasks = ["quickstart_choice", "quickstart_perplexity"]
    int4 = str(quickstart.quantized(4, 32, source=source))
    return olive_ext.evaluate(int4, tasks=tasks, execution_provider=device, **given)


@pytest.mark.parametrize("is_reference_there", [True, False])
@pytest.mark.parametrize(
    "device", [pytest.param("webgpu", marks=pytest.mark.webgpu), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_the_verdict_of_a_device_is_that_of_the_cpu(device: str, is_reference_there: bool) -> None:
    here, there = _report(device, "cpu"), _report(device, device, is_reference_there)
    assert there.verdict.status == here.verdict.status
    assert {reason.code for reason in there.verdict.reasons} == {reason.code for reason in here.verdict.reasons}
    means = [report.comparison.overall_divergence().kl.mean for report in (here, there)]  # type: ignore[union-attr]
    assert means[1] == pytest.approx(means[0], abs=NATS)
