"""Families whose kernels the WebGPU provider has run there: states kept at forks, and blocks that a table assigns.

More rows are in docs/decoders.md (`python -m docs.decoders --provider webgpu`); windowed caches are in tests/families.
"""

from __future__ import annotations

import pytest

from docs.decoders import measure

pytestmark = [pytest.mark.webgpu, pytest.mark.slow]

NATS = {"lfm2-genai-0.18": 1e-4, "llama-genai-0.18-paged-webgpu": 0.1}
"""Bounds to transformers in fp32. The paged export computes in fp16."""


@pytest.mark.parametrize("name", NATS)
def test_family_agrees_with_transformers_on_the_device(name: str) -> None:
    row = measure(name, "webgpu")
    assert "refused" not in row, row
    assert float(row["score"]) < NATS[name]
    assert float(row["batch"]) < NATS[name]
    assert row["fork"] == "1.00"
